"""The recipe of transcripts: its samples, its decoder, its proof, and the bench's letters."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch

from bench.transcripts import count_edits, error_rate, held_out_loss, read_held_out, write_down
from prompts import write_prompts
from recipe_files import enter_folder, load_recipe
from superstep.cli.main import main
from superstep.data.samples.ragged_rows import lay_row
from superstep.data.samples.sample_file import check_pure, open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.model.unit import UnitGraph
from superstep.plan.config import ModelConfig, RunConfig
from superstep.train.proof.plain.plain_samples import PlainSamples, sample_fault

NAME = "recipes/audio_transcripts"
SMALL = ["--model.width", "16", "--model.heads", "2", "--model.layers", "1", "--train.batch-sequences", "2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_prompts(tmp_path / "runs" / "prompts")
    return enter_folder(tmp_path, monkeypatch)


@pytest.fixture
def rows(here):
    """The fields of two rows of one sample each, and of one row of both."""
    samples = open_samples(f"{NAME}.py")
    read = [samples.read("train", n, seed=0, epoch=0) for n in (0, 1)]
    return [lay_row(each, samples.fields) for each in ([read[0]], [read[1]], read)]


def test_a_sample_is_a_prompt_with_its_words(here):
    check_pure(open_samples(f"{NAME}.py"), seed=0)
    recipe = load_recipe("audio_transcripts")
    sample, sizes = recipe.sample("train", 3, np.random.default_rng(0)), recipe.size("train", 3)
    assert {name: len(values) for name, values in sample.items()} == sizes
    said = "".join(recipe.LETTERS[letter] for letter in sample["target"].tolist())
    assert said == recipe.part("train", 3)[0]["text"] + recipe.LETTERS[0]
    assert torch.equal(sample["tokens"][1:], sample["target"][:-1])
    assert {recipe.part("train", n)[1] for n in range(50)} == {*recipe.SPEEDS}


def test_the_decoder_sees_its_own_sample_and_the_letters_before_alone(rows):
    recipe = load_recipe("audio_transcripts")
    model = UnitGraph(recipe.units(RunConfig(model=ModelConfig(width=16, heads=2, layers=1))), seed=0)

    def logits(row, **changed):
        return model({name: values[None] for name, values in (row | changed).items()})[0]

    first, second, both = rows
    letters = [int((row["tokens.sample"] == 0).sum()) for row in (first, second)]
    alone = torch.cat([logits(first)[: letters[0]], logits(second)[: letters[1]]])
    # A graph alone has causal attention over the row; here the second sample's letters see those of the first.
    together = logits(both)[: letters[0]]
    torch.testing.assert_close(together, alone[: letters[0]], atol=1e-5, rtol=1e-4)
    later = first["tokens"].clone()
    later[3] = 5
    assert torch.allclose(logits(first, tokens=later)[:3], alone[:3], atol=1e-6)
    silent = logits(first, mel=torch.zeros_like(first["mel"]))
    assert not torch.allclose(silent[: letters[0]], alone[: letters[0]], atol=1e-3)
    assert bool(logits(both).isfinite().all())


def test_the_layout_is_proven_bit_by_bit(here, capfd):
    assert main(["prove", f"{NAME}.toml", "--exact", *SMALL]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def test_a_sound_one_row_off_is_named(here):
    samples = open_samples(f"{NAME}.py")
    stream = SampleStream(samples, "train", batch_sequences=4, seed=0)
    plain = PlainSamples(samples=samples, split="train", seed=0)
    batch, mine = stream.batch(0, slice(0, 4)), slice(0, 4)
    assert sample_fault(batch, plain.batch(0, 4), mine) == ""
    shifted = {name: values.roll(1, 0) if name == "mel" else values for name, values in batch.fields.items()}
    fault = sample_fault(replace(batch, fields=MappingProxyType(shifted)), plain.batch(0, 4), mine)
    assert "'mel' is of another sample" in fault


def test_wrong_letters_are_counted_with_their_interval(here):
    assert count_edits("press one", "press one") == 0
    assert count_edits("press one", "pres done") == 2
    assert count_edits("one", "") == 3
    rate = error_rate([("one", "one"), ("two", "two"), ("three", ""), ("four", "for")] * 10)
    assert rate["error_rate"] == pytest.approx(6 / 15)
    low, high = rate["interval"]
    assert low < 6 / 15 < high
    recipe = load_recipe("audio_transcripts")
    model = UnitGraph(recipe.units(RunConfig(model=ModelConfig(width=16, heads=2, layers=1))), seed=0)
    fields = read_held_out(recipe, "cpu")
    assert 1 < held_out_loss(model, fields) < 10
    pairs = list(write_down(model, recipe, fields))
    assert [said for said, _ in pairs] == ["validation a", "validation f"]
    assert all({*written} <= {*recipe.LETTERS} for _, written in pairs)
