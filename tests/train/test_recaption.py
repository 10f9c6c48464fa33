"""The recipes of captions and of pictures made from them: their samples, their proofs, and the bench of both."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import numpy as np
import pytest
import torch

from bench import recaption
from recipe_files import RECIPES, enter_folder, load_recipe
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.data.samples.sample_file import check_pure, open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.engine.parallel.noise import find_place
from superstep.model.unit import UnitGraph
from superstep.numerics.noise import SamplePlace
from superstep.plan.config import ModelConfig, RunConfig
from superstep.plan.config_io import read_config
from superstep.train.proof import stream
from superstep.train.proof.plain.plain_samples import PlainSamples, sample_fault
from superstep.train.weights.model import resolve_config

SMALL = RunConfig(model=ModelConfig(width=16, heads=2, layers=1))
FLAGS = ["--model.width", "16", "--model.heads", "2", "--model.layers", "1", "--train.batch-sequences", "4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    return enter_folder(tmp_path, monkeypatch)


def test_captions_say_what_is_drawn_and_half_of_the_alt_texts_do_not():
    scenes = load_recipe("drawn_scenes")
    one = scenes.Scene("black", ((0, "red", "circle"), (3, "blue", "ring")))
    assert scenes.full_caption(one) == "a red circle top left and a blue ring bottom right on black"
    assert scenes.short_caption(one) == "a red circle"
    assert len(scenes.number_words(scenes.full_caption(one))) == scenes.LONGEST
    picture = scenes.draw_scene(one, 0)
    assert picture[:, 8, 8].tolist() == list(scenes.COLOURS["red"])
    assert picture[:, 24, 24].tolist() == [0, 0, 0]  # the middle of the ring
    texts = [scenes.alt_text("train", number, 1000) for number in range(400)]
    wrong = [text for text in texts if len(text.split()) == scenes.LONGEST]
    assert 160 < len(wrong) < 240
    assert sum(text == scenes.full_caption(scenes.scene("train", n)) for n, text in enumerate(texts)) < 3
    assert {*texts} - {*wrong} <= {"a picture", *(f"a {shape}" for shape in scenes.SHAPES)}


@pytest.mark.parametrize("name", ["captioner", "flow"])
def test_the_recipe_is_pure_and_its_layout_is_proven_bit_by_bit(here, capfd, name):
    check_pure(open_samples(f"recipes/{name}.py"), seed=0)
    assert main(["prove", f"recipes/{name}.toml", "--exact", *FLAGS]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def test_the_captioner_learns_the_words_of_the_caption_alone():
    recipe = load_recipe("captioner")
    for index in (6, 7):
        sample = recipe.sample("validation", index, np.random.default_rng(0))
        assert {name: len(values) for name, values in sample.items()} == {
            name: size for name, size in recipe.size("validation", index).items() if name != "counted"
        }
        learned = sample["target"][sample["target"] >= 0].tolist()
        assert learned == recipe.caption("validation", index)
        assert sample["tokens"][recipe.SEEN] == recipe.FIRST_STYLE + index % 2
        assert sample["tokens"][recipe.SEEN + 1 :].tolist() == learned[:-1]


def test_the_flow_predicts_the_pixels_from_their_mixture_with_noise():
    """Where the last unit's product is 0, the loss is that of the pixels themselves."""
    recipe = load_recipe("flow")
    units = recipe.units(SMALL)
    model = UnitGraph(units, seed=0)
    fields = [recipe.sample("validation", n, np.random.default_rng(0)) for n in range(3)]
    pixels, words = (torch.stack([each[name] for each in fields]) for name in ("pixels", "words"))
    mixed = model.units[0](pixels, noise=mock.Mock(normal=lambda n, x: x * 0 + 1, uniform=lambda n, x: x * 0 + 0.25))
    torch.testing.assert_close(mixed[..., :192], recipe.cut(0.75 * pixels + 0.25))
    assert mixed[..., 192].unique().tolist() == [0.25]
    place = SamplePlace(seed=1, step=2, sample=4, is_training=True)
    output = model({"pixels": pixels, "words": words}, place=place)
    again = model({"pixels": pixels, "words": words}, place=replace(place, sample=5))
    assert not torch.equal(again, output)
    torch.nn.init.zeros_(model.units[-1].out.weight)
    torch.nn.init.zeros_(model.units[-1].out.bias)
    loss = units[-1].loss(model({"pixels": pixels, "words": words}, place=place), pixels)
    assert float(loss.detach()) == pytest.approx(float(pixels.square().sum()))


def test_noise_belongs_to_the_sample_and_not_to_its_row():
    mix = UnitGraph(load_recipe("flow").units(SMALL)[:1], seed=0)
    pixels, place = torch.zeros(3, 3, 32, 32), SamplePlace(seed=1, step=2, sample=4, is_training=True)
    first, second = (mix({"pixels": pixels}, place=replace(place, sample=sample)) for sample in (4, 5))
    torch.testing.assert_close(second[:2], first[1:])
    assert not torch.equal(first[0], first[1])


def _noise_faults(rank, world, run, is_planted):
    def place(run, mesh, *others):
        return replace(find_place(run, mesh, *others), seed=mesh.rank)

    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    with mock.patch.object(stream, "find_place", place) if is_planted else mock.MagicMock():
        found = stream.noise_fault(run, mesh)
    mesh.destroy()
    return found


@pytest.mark.multiproc
def test_noise_by_a_seed_for_each_rank_is_named(pool, here):
    run = resolve_config(read_config(RECIPES / "flow.toml"))
    assert pool.run(2, _noise_faults, run, False) == ["", ""]
    named = "random numbers of rank 1, microbatch 0: the seed is 1, not 0"
    assert pool.run(2, _noise_faults, run, True) == ["", named]


def test_a_picture_one_row_off_is_named(here):
    samples = open_samples("recipes/captioner.py")
    read = SampleStream(samples, "train", batch_sequences=4, seed=0).batch(0, slice(0, 4))
    plain = PlainSamples(samples=samples, split="train", seed=0).batch(0, 4)
    assert sample_fault(read, plain, slice(0, 4)) == ""
    shifted = {name: values.roll(1, 0) if name == "pixels" else values for name, values in read.fields.items()}
    fault = sample_fault(replace(read, fields=MappingProxyType(shifted)), plain, slice(0, 4))
    assert "'pixels' is of another sample" in fault


def test_the_bench_writes_captions_draws_and_counts_what_is_there(here, tmp_path):
    captioner, flow = load_recipe("captioner"), load_recipe("flow")
    recipes = recaption.Recipes(flow.scenes, captioner, flow)
    pictures = flow.scenes.to_pixels(torch.stack([flow.scenes.picture("validation", number) for number in range(6)]))
    written = recaption.write_captions(UnitGraph(captioner.units(SMALL), seed=0), pictures[:2], 0, recipes, "cpu")
    assert all({*text.split()} <= {*flow.scenes.WORDS} for text in written)
    texts = [flow.scenes.full_caption(flow.scenes.scene("validation", number)) for number in range(6)]
    model = UnitGraph(flow.units(SMALL), seed=0)
    drawn = recaption.draw(model, texts, flow, "cpu", 2)
    assert drawn.shape == (6, 3, 32, 32)
    classes = torch.tensor([recaption.list_classes(flow.scenes.scene("validation", n), flow.scenes) for n in range(6)])
    torch.testing.assert_close(recaption.cut_quarters(pictures)[1], pictures[0, :, :16, 16:])
    one_hot = torch.nn.functional.one_hot(classes.flatten(), 21).float()
    assert recaption.score(lambda each: one_hot, pictures, classes).tolist() == [1.0] * 6
    empty = torch.zeros(24, 21).index_fill(1, torch.tensor([0]), 1.0)
    assert recaption.score(lambda each: empty, pictures, classes).tolist() == [0.0] * 6
    told = recaption.interval(torch.tensor([1.0, 0.5, 0.0, 0.5]))
    assert told["drawn"] == 0.5
    columns = [((each + 1) * 127.5).to(torch.uint8) for each in (drawn, pictures)]
    recaption.write_png(tmp_path / "grid.png", recaption.draw_grid(columns))
    image = pytest.importorskip("PIL.Image").open(Path(tmp_path / "grid.png"))
    assert image.size == (2 * 2 * 34, 2 * 6 * 34)
