"""A user's file of samples: read by number, refused in one line where it is no function of its arguments."""

import textwrap

import pytest
import torch

from superstep.data.samples.noise import noise_of
from superstep.data.samples.sample_file import check_pure, open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.data.shuffle import permute
from superstep.errors import ConfigError, DataError

GOOD = """
import torch

def length(split):
    return 7 if split == "train" else 3

def sample(split, index, noise):
    pixels = torch.full((1, 2, 2), float(index)) + torch.from_numpy(noise.normal(size=(1, 2, 2))).float()
    return {"pixels": pixels, "target": torch.tensor(index % 3)}
"""


def write(folder, text):
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_stream_gives_each_sample_once_an_epoch_in_the_order_of_the_seed(tmp_path):
    samples = open_samples(write(tmp_path, GOOD))
    check_pure(samples, seed=5)
    stream = SampleStream(samples, "train", batch_sequences=7, seed=5)
    for epoch in range(2):
        batch = stream.batch(7 * epoch, slice(0, 7))
        order = permute(torch.arange(7).numpy(), 7, seed=5, epoch=epoch)
        assert batch.targets_BS.tolist() == [index % 3 for index in order]
        for row, index in enumerate(order):
            wanted = samples.function("train", int(index), noise_of(5, "train", epoch, int(index)))
            assert torch.equal(batch.input[row], wanted["pixels"])
    assert not torch.equal(stream.batch(0, slice(0, 7)).input.sum(0), stream.batch(7, slice(0, 7)).input.sum(0))


def test_ranks_read_their_own_rows_of_one_batch(tmp_path):
    stream = SampleStream(open_samples(write(tmp_path, GOOD)), "train", batch_sequences=4, seed=0)
    whole = stream.batch(5, slice(0, 4))
    parts = [stream.batch(5, rows) for rows in (slice(0, 2), slice(2, 4))]
    assert torch.equal(torch.cat([part.input for part in parts]), whole.input)
    assert [part.valid_tokens for part in parts] == [4, 4]


def test_validation_is_in_plain_order_and_the_same_each_time(tmp_path):
    stream = SampleStream(open_samples(write(tmp_path, GOOD)), "validation", batch_sequences=3, seed=0)
    assert stream.batch(0, slice(0, 3)).targets_BS.tolist() == [0, 1, 2]
    assert torch.equal(stream.batch(0, slice(0, 3)).input, stream.batch(3, slice(0, 3)).input)


def test_noise_depends_on_seed_split_epoch_and_sample():
    places = [(0, "train", 0, 0), (1, "train", 0, 0), (0, "validation", 0, 0), (0, "train", 1, 0), (0, "train", 0, 1)]
    drawn = [noise_of(*place).integers(2**62, size=64).tolist() for place in places]
    assert drawn[0] == noise_of(*places[0]).integers(2**62, size=64).tolist()
    assert len({number for numbers in drawn for number in numbers}) == 5 * 64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("noise.normal(size=(1, 2, 2))", "__import__('numpy').random.rand(1, 2, 2)"), "gives another 'pixels'"),
        (("torch.tensor(index % 3)", "torch.randint(9999999, ())"), "gives another 'target'"),
        (("7 if split", "__import__('random').randrange(1, 10**9) if split"), "length('train') is"),
        (('"target": torch', '"targets": torch'), "has no field 'target'; did you mean 'targets'?"),
        (("return {", "return torch.zeros(2) or {"), "sample('train', 0) fails: RuntimeError"),
        (("torch.tensor(index % 3)", "index % 3"), "gives 'target' as int; return a dict of tensors"),
        (("return 7", "return 0 and 7"), "length('train') gives 0; return the number of its samples"),
        (("return 7 if", "return None if"), "length('train') gives None"),
        (('{"pixels"', '{"mask": pixels, "pixels"'), "The first unit reads one; name it in the file, as INPUT"),
        (("torch.full((1, 2, 2)", "torch.full((1, 2, 2 + index // 6)"), "sample('train', 6) "),
        (("torch.tensor(index % 3)", "torch.tensor(index % 3 - 100)"), "has the target -100"),
        (("def sample(", "INPUT = 'pixel'\ndef sample("), "INPUT = 'pixel' is no field; did you mean 'pixels'?"),
    ],
)
def test_a_file_that_gives_no_samples_is_refused_in_one_line(tmp_path, change, says):
    text = GOOD.replace(*change)
    assert text != GOOD
    if "index // 6" in text:
        text = text.replace("size=(1, 2, 2)", "size=(1, 2, 2 + index // 6)")
    with pytest.raises(DataError) as refused:
        check_pure(open_samples(write(tmp_path, text)), seed=0)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("data.source: ")


def test_a_sample_of_another_shape_is_named_when_it_is_read(tmp_path):
    text = GOOD.replace("(1, 2, 2)", "(1, 2, 2 + (index == 3))")
    samples = open_samples(write(tmp_path, text))
    with pytest.raises(DataError, match=r"sample\('train', 3\) has 'pixels' as float32 \[1, 2, 3\]"):
        SampleStream(samples, "train", batch_sequences=7, seed=0).batch(0, slice(0, 7))


def test_a_file_without_the_functions_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data.source: .* has no function 'sample\(split, index, noise\)'"):
        open_samples(write(tmp_path, GOOD.replace("def sample", "def samples")))


def test_the_field_that_the_first_unit_reads_may_be_named(tmp_path):
    text = GOOD.replace('{"pixels"', '{"mask": pixels, "pixels"') + "\nINPUT = 'pixels'\n"
    samples = open_samples(write(tmp_path, text))
    assert samples.fields.reads == "pixels"
    batch = SampleStream(samples, "train", batch_sequences=2, seed=0).batch(0, slice(0, 2))
    assert set(batch.fields) == {"mask", "pixels"}
