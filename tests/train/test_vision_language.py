"""The recipe of questions on composed pictures: its samples and its layout."""

import numpy as np
import pytest
import torch

from bench import vision_language
from emoji import write_emoji
from recipe_files import enter_folder, load_recipe
from superstep.cli.main import main
from superstep.data.samples.sample_file import check_pure, open_samples

SMALL = ["--model.width", "24", "--model.heads", "2", "--model.layers", "1", "--train.batch-sequences", "4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_emoji(tmp_path / "runs" / "emoji")
    return enter_folder(tmp_path, monkeypatch)


def test_answers_are_those_of_the_picture_and_held_out_pairs_are_never_trained_on(here):
    samples = open_samples("recipes/vision_language.py")
    check_pure(samples, seed=0)
    recipe = load_recipe("vision_language")
    shown = []

    def compose(cells, kinds, noise):
        shown.append(dict(zip(cells, kinds, strict=False)))
        return torch.zeros(3, 48, 48)

    recipe.compose = compose
    for split in ("train", "validation", "test"):
        for index in range(300):
            sample = recipe.sample(split, index, np.random.default_rng(index))
            picture, kinds = shown.pop(), set()
            words, answers = sample["tokens"][9:].tolist(), sample["target"][10::2].tolist()
            for asked, answer in zip(words[1::2], answers, strict=True):
                match recipe.QUESTIONS[words[0] - recipe.QUESTION]:
                    case "what":
                        assert picture[asked - recipe.CELL] == answer - recipe.KIND
                        kinds.add(answer - recipe.KIND)
                    case "where":
                        assert picture[answer - recipe.CELL] == asked - recipe.KIND
                        kinds.add(asked - recipe.KIND)
                    case "how many":
                        count = list(picture.values()).count(asked - recipe.KIND)
                        assert count == answer - recipe.NUMBER + 1
                        kinds.add(asked - recipe.KIND)
            assert len(kinds) == recipe.ASKED
            together = {*picture.values()}
            held_out = {
                of for of in recipe.HELD_OUT for a in together for b in together if recipe.is_held_out(a, b, of)
            }
            assert split in held_out if split != "train" else not held_out


def test_the_recipe_trains_and_its_layout_is_proven_bit_by_bit(here, capfd):
    short = ["--train.steps", "4", "--train.eval-every", "4", "--train.warmup-steps", "2", "--plan.microbatch", "2"]
    assert main(["train", "recipes/vision_language.toml", *SMALL, *short]) == 0
    assert vision_language.main(["runs/vision_language", "--samples", "6"]) == 0
    assert '"what": ' in capfd.readouterr().out
    assert main(["prove", "recipes/vision_language.toml", "--exact", *SMALL, "--plan.microbatch", "2"]) == 0
    assert " 0 with other bits" in capfd.readouterr().out
