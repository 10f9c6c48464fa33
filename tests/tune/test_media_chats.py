"""`superstep tune sft` on conversations with pictures and with sounds: what is prepared, learnt, proven and refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import runs
import tuned
from media_chats import PICTURES, ask, make_media_files, write_picture, write_sound
from superstep.cli.main import main
from superstep.data.sources.conversations import read_input
from superstep.data.sources.media_input import Medium
from superstep.data.sources.picture_input import fit_sides
from superstep.data.sources.source import open_any_samples
from superstep.data.tokenizer import load_tokenizer
from superstep.numerics.loss import IGNORE
from superstep.plan.config import ModelConfig
from superstep.tune.loss_mask import TokenizedConversation, expand

MEDIA = tuple(Medium(name, (2, 2)) for name in "abc")
GOOD = {"type": "KIND", "KIND": "GOOD"}
LAYOUT = ["--plan.dp", "2", "--plan.zero", "2", "--plan.microbatch", "1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {kind: make_media_files(tmp_path_factory.mktemp(kind), kind) for kind in ("pictures", "sounds")}


@pytest.fixture(params=["pictures", "sounds"])
def kind(request):
    return request.param


@pytest.fixture
def place(made, kind, tmp_path, monkeypatch):
    for path in made[kind].iterdir():
        if path.name != "recipe.toml":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "recipe.toml").write_text((made[kind] / "recipe.toml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune(*flags):
    return main(["tune", "sft", "recipe.toml", *flags])


def test_a_run_learns_answers_alone_goes_on_and_is_proven(place, kind, capfd):
    assert tune("--train.steps", "2", "--state.save-every", "2") == 0
    samples, tokenizer = open_any_samples("tuned/data"), load_tokenizer(Path("base/tokenizer.json"))
    token = read_input(ModelConfig(name="base/config.json")).token
    words = set()
    for index in range(samples.lengths["train"]):
        sample = samples.read("train", index, seed=0, epoch=0)  # checks sizes, and as many tokens as rows
        learnt = sample["target"][sample["target"] != IGNORE]
        assert token not in learnt
        words.add(tokenizer.decode(learnt.tolist()))
    assert words <= {f"{word}<|im_end|>" for word in WORDS[kind]}
    assert len(words) > 2
    (checkpoint,) = Path("tuned/checkpoints").iterdir()
    beside = {"config.json", "tokenizer.json", "chat_template.jinja", "corpus.json"}
    assert beside <= {path.name for path in checkpoint.iterdir()}
    assert tune("--train.steps", "3", "--state.existing", "resume") == 0
    capfd.readouterr()
    assert main(["prove", "tuned/run.toml", "--exact", *LAYOUT]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


WORDS = {
    "pictures": ["red", "green", "blue", "red green", "green blue", "blue red", "or not"],
    "sounds": ["low", "high", "or not"],
}


def test_a_tuned_model_is_tuned_again_in_another_folder(place):
    assert tune("--train.steps", "1", "--sft.epochs", "0.1") == 2
    assert tune("--train.steps", "1") == 0
    assert tune("--train.steps", "1", "--start", "tuned", "--state.existing", "new") == 0
    assert open_any_samples("tuned-2/data").lengths == open_any_samples("tuned/data").lengths


def test_a_cut_leaves_pictures_whole():
    sample = expand(
        TokenizedConversation(ids=(1, 9, 9, 2, 9, 3), is_answer=bytes(6), answer_bytes=0), 9, MEDIA, [2, 3, 2]
    )
    assert sample.ids == (1, 9, 9, 9, 9, 9, 2, 9, 9, 3)
    assert sample.places == ((1, 3), (3, 6), (7, 9))
    for size, left, media in ((10, 10, 3), (9, 7, 2), (8, 7, 2), (7, 7, 2), (6, 1, 0), (5, 1, 0), (1, 1, 0)):
        cut = sample.cut(size, 99)
        assert (len(cut.ids), len(cut.is_answer), cut.media) == (left, left, MEDIA[:media])
    for room, left, media in ((7, 10, 3), (6, 7, 2), (4, 1, 0)):
        cut = sample.cut(10, room)
        assert (len(cut.ids), cut.media) == (left, MEDIA[:media])


@pytest.mark.parametrize("kind", ["pictures"], indirect=True)
def test_a_conversation_is_cut_in_front_of_a_picture(place):
    image = {"type": "image", "image": "0.png"}
    messages = [*ask([image], "red")["messages"], *ask([{"type": "text", "text": "and"}, image], "red")["messages"]]
    tuned.write_records(Path("two.jsonl"), [{"messages": messages}] * 8)
    flags = ["--data.corpus", "two.jsonl", "--data.media-tokens", "3", "--sft.too-long", "truncate"]
    assert tune("--train.steps", "1", *flags) == 0
    samples = open_any_samples("tuned/data")
    assert all(len(json.loads(line)) == 1 for line in Path("tuned/data/train.media").read_text().splitlines())
    assert len(samples.read("train", 0, seed=0, epoch=0)["pixels"]) == 2 * 4


@pytest.mark.parametrize(
    ("part", "flags", "says"),
    [
        ({"type": "video", "video": "a.mp4"}, [], r"type 'video', messages\[0\].content\[0\], and the model "),
        ({"type": "KIND", "KIND": "https://example.com/a"}, [], "has a remote URL, .* = 'https://example.com/a'"),
        ({"type": "KIND", "KIND": "absent.wav"}, [], "absent.wav' is no "),
        ({"type": "KIND"}, [], r"has messages\[0\].content\[0\] without a file or a data: URL"),
        ({"type": "KIND", "KIND": "data:x/y;base64,_"}, [], "that is no base64"),
        (GOOD, ["--data.media-tokens", "1"], r"'[^']*', which takes \d tokens, and a row has room for 1 of"),
        (GOOD, ["--sft.template", "none.jinja"], "shows it 0 of the tokens 3.. that stand for one"),
        (GOOD, ["--sft.template", "twice.jinja"], "shows it 2 of the tokens 3.. that stand for one"),
        (GOOD, ["--data.media-tokens", "99"], "data.media_tokens = 99 must be at least 1 and at most"),
        (GOOD, ["--data.packed", "false"], "data.packed = false with start"),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt_is_refused_in_one_line(place, kind, capfd, part, flags, says):
    sort, good = {"pictures": ("image", "2.png"), "sounds": ("audio", "1.wav")}[kind]
    written = json.dumps(part).replace("KIND", sort).replace("GOOD", good)
    template = (Path("base") / "chat_template.jinja").read_text()
    Path("none.jinja").write_text(template.replace("<|pad|>", ""))
    Path("twice.jinja").write_text(template.replace("<|pad|>", "<|pad|><|pad|>"))
    bad = ask([json.loads(written)], "red")
    tuned.write_records(Path("bad.jsonl"), [bad] * 4)
    assert tune("--data.corpus", "bad.jsonl", *flags) == 2
    err = capfd.readouterr().err
    assert re.search(says, err), err
    assert re.fullmatch(r"superstep: [^\n]+\n", err)


@pytest.mark.parametrize("kind", ["pictures"], indirect=True)
@pytest.mark.parametrize(
    ("record", "says"),
    [
        (ask([{"type": "audio", "audio": "1.wav"}], "red"), "type 'audio', messages.* reads text and pictures"),
        (ask("red", [{"type": "image", "image": "0.png"}]), "has a picture in an answer, messages"),
        (ask([{"type": "text", "text": "<|pad|>"}, {"type": "image", "image": "0.png"}], "red"), ""),
    ],
)  # fmt: skip
def test_a_picture_is_none_without_its_part(place, capfd, record, says):
    """The last record spells the token of a picture: it is text, and no picture."""
    tuned.write_records(Path("bad.jsonl"), [record] * 4)
    assert tune("--data.corpus", "bad.jsonl", "--train.steps", "1") == (2 if says else 0)
    assert re.search(says, capfd.readouterr().err)


@pytest.mark.parametrize("kind", ["sounds"], indirect=True)
def test_preferences_and_text_alone_refuse_parts(place, capfd, tmp_path):
    assert main(["tune", "dpo", "recipe.toml"]) == 2
    assert "reads more than text, and superstep tune dpo learns from text alone" in capfd.readouterr().err
    text = tmp_path / "text"
    text.mkdir()
    tuned.make_files(text, template=tuned.CHATML)
    assert tune("--start", "text/base", "--data.media-tokens", "3") == 2
    assert "data.media_tokens = 3 is of conversations with pictures" in capfd.readouterr().err
    recipe = ["tune", "sft", "text/recipe.toml", "--start", "text/base", "--data.corpus", "chats.jsonl"]
    assert main(recipe) == 2
    assert "has a part of type 'audio', messages[0].content[0], and the model reads text;" in capfd.readouterr().err


def test_a_picture_is_scaled_as_transformers_does(made, tmp_path, monkeypatch):
    reads = read_input(ModelConfig(name=str(made["pictures"] / "base" / "config.json")))
    bounds = {"shortest_edge": PICTURES["min_pixels"], "longest_edge": PICTURES["max_pixels"]}
    theirs = Qwen2VLImageProcessorPil(
        size=bounds, image_mean=PICTURES["image_mean"], image_std=PICTURES["image_std"], patch_size=2, merge_size=2,
        temporal_patch_size=1,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    for height, width in ((7, 9), (3, 3), (40, 21), (5, 64)):
        picture = Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))
        picture.save(tmp_path / "a.png")
        medium = reads.measure(tmp_path / "a.png")
        ours = reads.lay_out(torch.tensor([reads.token] * (medium.size[0] * medium.size[1] // 4)), [medium], tmp_path)
        wanted = theirs(picture, return_tensors="pt")
        assert wanted["image_grid_thw"].tolist() == [[1, *medium.size]]
        torch.testing.assert_close(ours["pixels"], wanted["pixel_values"], atol=1e-5, rtol=0)
    assert fit_sides(6, 10, 4, 16, 96) == (8, 8)


def test_a_photograph_stands_upright(tmp_path, made):
    reads = read_input(ModelConfig(name=str(made["pictures"] / "base" / "config.json")))
    picture, exif = Image.new("RGB", (12, 4)), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    picture.save(tmp_path / "a.jpg", exif=exif)
    assert reads.measure(tmp_path / "a.jpg").size == (6, 2)


def test_other_frames_are_refused(place, kind, capfd):
    """A folder's preprocessor_config.json that differs from its model."""
    target = (place / "base").resolve()
    (place / "base").unlink()
    (place / "base").mkdir()
    for path in target.iterdir():
        (place / "base" / path.name).write_bytes(path.read_bytes())
    key = {"pictures": "patch_size", "sounds": "feature_size"}[kind]
    Path("base/preprocessor_config.json").write_text(json.dumps({key: 3}))
    assert tune() == 2
    assert f"preprocessor_config.json: {key} = 3 is not supported; it must be" in capfd.readouterr().err
    assert not runs.events(Path("tuned"), "step") if Path("tuned").exists() else True


def test_files_that_do_not_fit_are_named(place, kind, capfd):
    if kind == "sounds":
        path, says = write_sound(Path("long.wav"), "low", 2.0), "takes 4 to 48; cut it into parts"
        part = {"type": "audio", "audio": path.name}
    else:
        path, says = write_picture(Path("thin.png"), "red", (402, 2)), "one side may be 200 times the other"
        part = {"type": "image", "image": path.name}
    tuned.write_records(Path("bad.jsonl"), [ask([part], "red")] * 4)
    assert tune("--data.corpus", "bad.jsonl") == 2
    assert says in capfd.readouterr().err
