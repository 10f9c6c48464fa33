"""Runs on ragged samples: trained, resumed, and proven on every layout; faults in their rows are named."""

import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

import runs
from ragged import SOUNDS, WORDS, write_ragged
from superstep.cli.main import main
from superstep.data.samples import sample_file
from superstep.data.samples.noise import noise_of
from superstep.data.samples.sample_file import open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.data.shuffle import order_at
from superstep.model.custom.within_samples import attend_within, mean_within, neighbours_within, positions_within
from superstep.train.proof.plain.plain_samples import PlainSamples, sample_fault

SIZE, MINE = 6, slice(3, 6)

HALVED = """
    from dataclasses import replace
    from superstep.model.decoder import Head

    class Half(Head):
        def forward(self, x):
            return super().forward(x[:, ::2])

    *blocks, head = decoder_units(SHAPE)
    return [*blocks, replace(head, build=lambda: Half(SHAPE))]
"""


@pytest.fixture(params=["sounds", "words"])
def here(request, tmp_path, monkeypatch):
    write_ragged(tmp_path, request.param)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_on_with_the_same_bits(here, capfd):
    assert main(["train", "run.toml", "--state.dir", "whole"]) == 0
    assert re.search(
        r"\d0 samples are packed into \d\d rows; filled are \d\d% of (values|tokens),", capfd.readouterr().out
    )
    runs.resume_killed()
    steps = {event["step"]: event["tokens"] for event in runs.events(Path("run"), "step")}
    assert len(set(steps.values())) > 1  # targets of a step, which differ


def test_every_layout_has_the_same_bits(here, capfd):
    assert main(["prove", "run.toml"]) == 0
    assert "samples or paddings begin within a row" in capfd.readouterr().out
    assert main(["prove", "run.toml", "--exact", "--all", "--world", "4"]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def faults(folder, name, change=lambda batch: batch, *, seed=3):
    samples = open_samples(write_ragged(folder, name))
    stream = SampleStream(samples, "train", batch_sequences=SIZE, seed=seed)
    plain = PlainSamples(samples=samples, split="train", seed=3)
    at = plain.count - 2  # a batch in which an epoch ends
    return sample_fault(change(stream.batch(at, MINE)), plain.batch(at, SIZE), MINE)


def test_the_stream_is_that_of_plain_code(tmp_path):
    for name in ("sounds", "words"):
        assert faults(tmp_path, name) == ""


MIXED = """
import torch

CAPACITY = {"tokens": 12, "patches": 8, "target": 12}
INPUT = "tokens"

def length(split):
    return 20

def size(split, index):
    tokens, patches = (3, 0, 5)[index % 3], (0, 4, 2)[index % 3]
    return {"tokens": tokens, "patches": patches, "target": tokens}

def sample(split, index, noise):
    sizes = size(split, index)
    tokens = torch.full((sizes["tokens"],), index)
    return {"tokens": tokens, "patches": torch.full((sizes["patches"], 2), float(index)), "target": tokens}
"""


def test_samples_of_text_of_pictures_and_of_both_share_rows(tmp_path):
    """Fields of the same sample have the same number in it, also where another sample has none of a field."""
    samples = open_samples(write_ragged(tmp_path, "mixed", MIXED))
    stream = SampleStream(samples, "train", batch_sequences=5, seed=3)
    plain = PlainSamples(samples=samples, split="train", seed=3)
    assert sample_fault(stream.batch(4, slice(0, 5)), plain.batch(4, 5), slice(0, 5)) == ""
    kinds = set()
    for row in range(plain.count):
        batch = stream.batch(row, slice(0, 1))
        for number, index in enumerate(stream._rows.samples[int(order_at(row, 1, plain.count, seed=3).numbers[0])]):
            tokens = batch.fields["tokens"][batch.fields["tokens.sample"] == number]
            patches = batch.fields["patches"][batch.fields["patches.sample"] == number]
            assert {*tokens.tolist(), *map(int, patches.flatten().tolist())} == {index}
            kinds.add((len(tokens), len(patches)))
    assert kinds == {(3, 0), (0, 4), (5, 2)}


@pytest.mark.parametrize("name", ["sounds", "words"])
def test_rows_of_another_place_or_seed_are_named(tmp_path, name):
    def one_off(batch):
        fields = {field: values.roll(1, 0) for field, values in batch.fields.items()}
        return replace(batch, fields=MappingProxyType(fields), targets_BS=batch.targets_BS.roll(1, 0))

    assert "is of another sample" in faults(tmp_path, name, one_off)
    assert "targets are counted" in faults(tmp_path, name, seed=4)
    assert "targets are counted" in faults(tmp_path, name, lambda b: replace(b, valid_tokens=b.valid_tokens + 1))
    shifted = faults(tmp_path, name, lambda b: replace(b, starts_BS=b.starts_BS.clamp(max=1)))
    assert "'start of the sample' is of another sample" in shifted


def test_noise_by_a_seed_for_each_rank_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_file, "noise_of", lambda seed, *place: noise_of(seed + 1, *place))
    assert "'values' is of another sample" in faults(tmp_path, "sounds")


def test_attention_over_places_of_another_field_is_refused(tmp_path, monkeypatch, capfd):
    """A block between the tokens and every other place, which the target has."""
    monkeypatch.chdir(tmp_path)
    text = WORDS.replace('"target": 24', '"target": 12').replace('"target": places', '"target": (places + 1) // 2')
    text = text.replace('"counted": places - 2', '"counted": (places + 1) // 2').replace("target[:2] = -100", "")
    text = text.replace('"target": target}', '"target": target[::2]}')
    text = text.replace("return decoder_units(SHAPE)", HALVED)
    write_ragged(tmp_path, "words", text)
    assert main(["prove", "run.toml"]) == 2
    err = capfd.readouterr().err
    assert "within the samples of the target's 12 places: unit 'block.0' does not run on an input [1, 24, 16]" in err


def test_batch_norm_over_rows_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text = SOUNDS.replace(
        "self.conv = nn.Linear(9, 8)", "self.conv, self.norm = nn.Linear(9, 8), BatchNorm(8, group=1)"
    )
    write_ragged(tmp_path, "sounds", "from superstep.model.by_place.batch_norm import BatchNorm" + text)
    assert main(["prove", "run.toml"]) == 2
    assert "a row of ragged samples is no sample" in capfd.readouterr().err


def test_samples_of_a_row_do_not_see_each_other():
    numbers = torch.tensor([[0, 0, 0, 1, 1, -1]])
    assert positions_within(numbers).tolist() == [[0, 1, 2, 0, 1, 0]]
    x = torch.randn(1, 6, 8)
    conv = torch.nn.Conv1d(8, 5, 3, padding=1)
    weight = conv.weight.permute(0, 2, 1).flatten(1)
    out = neighbours_within(x, numbers) @ weight.T + conv.bias
    heads = x.unflatten(-1, (2, 4))
    seen = attend_within(heads, heads, heads, numbers_BS=numbers)
    means = mean_within(x, numbers, 3)
    for number, part in ((0, slice(0, 3)), (1, slice(3, 5))):
        torch.testing.assert_close(out[0, part], conv(x[:, part].mT)[0].T)
        alone = [heads[:, part].transpose(1, 2)] * 3
        wanted = torch.nn.functional.scaled_dot_product_attention(*alone).transpose(1, 2)
        torch.testing.assert_close(seen[:, part], wanted)
        torch.testing.assert_close(means[:, number], x[:, part].mean(1))
    assert not means[:, 2].any()


def test_places_see_their_sample_in_another_field():
    numbers, key_numbers = torch.tensor([[0, 0, 1, -1]]), torch.tensor([[0, 1, 1, 1, 1]])
    q, k, v = torch.randn(1, 4, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4)
    seen = attend_within(q, k, v, numbers_BS=numbers, key_numbers_BT=key_numbers)
    torch.testing.assert_close(seen[:, :2], v[:, :1].expand(-1, 2, -1, -1))
    alone = [x.transpose(1, 2) for x in (q[:, 2:3], k[:, 1:], v[:, 1:])]
    wanted = torch.nn.functional.scaled_dot_product_attention(*alone).transpose(1, 2)
    torch.testing.assert_close(seen[:, 2:3], wanted)
    assert bool(seen.isfinite().all())  # padding sees all, where there is no padding to see
