"""The proof's plain code of samples: it sees a wrong order, wrong rows, other noise and a wrong count."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from pictures import write_pictures
from superstep.data.samples.sample_file import open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.train.proof.plain.plain_samples import PlainSamples, sample_fault

SIZE = 12
MINE = slice(6, 12)


@pytest.fixture
def samples(tmp_path):
    write_pictures(tmp_path)
    return open_samples(tmp_path / "pictures.py")


def faults(samples, change=lambda batch: batch, *, seed=3, at=54):
    """What is said of rows of the batch in which the first epoch ends."""
    stream = SampleStream(samples, "train", batch_sequences=SIZE, seed=seed)
    plain = PlainSamples(samples=samples, split="train", seed=3)
    return sample_fault(change(stream.batch(at, MINE)), plain.batch(54, SIZE), MINE)


def test_the_stream_is_that_of_plain_code(samples):
    assert faults(samples) == ""
    stream = SampleStream(samples, "validation", batch_sequences=SIZE, seed=3)
    plain = PlainSamples(samples=samples, split="validation", seed=3)
    assert sample_fault(stream.batch(12, MINE), plain.batch(12, SIZE), MINE) == ""


def test_another_order_and_another_place_are_seen(samples):
    assert "is of another sample" in faults(samples, seed=4)
    assert "is of another sample" in faults(samples, at=53)


def test_the_noise_of_another_epoch_is_seen(samples):
    def without_noise(batch):
        clean = MappingProxyType({"pixels": batch.fields["pixels"].roll(1, 3)})
        return replace(batch, fields=clean)

    assert "'pixels' is of another sample" in faults(samples, without_noise)


def test_a_wrong_count_and_missing_rows_are_seen(samples):
    assert "11 targets are counted, and there are 12" in faults(samples, lambda b: replace(b, valid_tokens=11))
    assert "5 rows are read, and 6 are its own" in faults(samples, lambda b: b.rows(slice(0, 5)))
