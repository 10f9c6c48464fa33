"""Rows of ragged samples: packed by size, kept apart by number, refused in one line where sizes are no sizes."""

import pytest
import torch

from ragged import SOUNDS, WORDS, write_ragged
from superstep.data.samples.ragged_rows import pack_rows, starts_of
from superstep.data.samples.sample_file import check_pure, open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.errors import DataError
from superstep.numerics.loss import IGNORE


def stream(folder, name="sounds", *, split="train", size=5, seed=3):
    return SampleStream(open_samples(write_ragged(folder, name)), split, batch_sequences=size, seed=seed)


@pytest.mark.parametrize("name", ["sounds", "words"])
def test_an_epoch_has_every_sample_once_and_no_row_is_overfull(tmp_path, name):
    samples = open_samples(write_ragged(tmp_path, name))
    check_pure(samples, seed=0)
    sizes, capacities = samples.sizes("train"), samples.fields.capacities
    rows = pack_rows(sizes, capacities)
    assert sorted(index for row in rows.samples for index in row) == list(range(samples.lengths["train"]))
    for row in rows.samples:
        assert all(sum(sizes[index][field] for index in row) <= room for field, room in capacities.items())
    assert len(rows.samples) < 0.7 * samples.lengths["train"]
    assert rows.counted.sum() == sum(one.get("counted", one["target"]) for one in sizes)


def test_rows_hold_whole_samples_and_their_numbers(tmp_path):
    rows = stream(tmp_path, split="validation", size=6)
    batch = rows.batch(0, slice(0, 6))
    for row, packed in enumerate(rows._rows.samples[:6]):
        numbers = batch.fields["values.sample"][row]
        assert batch.fields["target.sample"][row].tolist() == [*range(len(packed)), *[-1] * (4 - len(packed))]
        for number, index in enumerate(packed):
            one = rows._samples.read("validation", index, seed=3, epoch=0)
            for name in ("values", "places"):
                assert torch.equal(batch.fields[name][row][numbers == number], one[name])
            assert batch.targets_BS[row, number] == one["target"][0]
        assert not batch.fields["values"][row][numbers == -1].any()
        assert (batch.targets_BS[row, len(packed) :] == IGNORE).all()
    assert batch.valid_tokens == int((batch.targets_BS != IGNORE).sum())


def test_ranks_read_their_own_rows_and_count_the_whole_batch(tmp_path):
    rows = stream(tmp_path, "words")
    for cursor in (0, 7, 23):
        whole = rows.batch(cursor, slice(0, 5))
        parts = [rows.batch(cursor, part) for part in (slice(0, 1), slice(1, 5))]
        for name, values in whole.fields.items():
            assert torch.equal(torch.cat([part.fields[name] for part in parts]), values)
        counted = int((whole.targets_BS != IGNORE).sum())
        assert [part.valid_tokens for part in (whole, *parts)] == [counted] * 3


def test_starts_are_those_of_samples():
    numbers = torch.tensor([[0, 0, 1, 2, 2, -1, -1], [0, 1, 1, 1, 1, 1, 1]])
    assert starts_of(numbers).tolist() == [[0, 0, 2, 3, 3, 5, 5], [0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("text", "change", "says"),
    [
        (SOUNDS, ("def size(", "def sizes("), "has CAPACITY and no function 'size(split, index)'"),
        (SOUNDS, ("CAPACITY = ", "ROOM = "), "or the file a CAPACITY and size(split, index)."),
        (SOUNDS, ('"target": 4}', '"target": 0}'), "give the first dim of each field in a row"),
        (SOUNDS, ('"places": 16, ', ""), "CAPACITY lacks the field 'places'; add its first dim in a row."),
        (
            SOUNDS,
            ('"places": 16', '"places": 16, "place": 2'),
            "'place', which is no field; did you mean 'places'?",
        ),
        (SOUNDS, ("classes[index, None]", "classes[index]"), "has 'target' without a dim, and several samples share"),
        (SOUNDS, ("classes[index, None]", "classes[index, None].float()"), "must be int64 with one dim"),
        (SOUNDS, ('"places": places, "target": 1}', '"target": 1}'), "return a dict with the first dim of each field"),
        (SOUNDS, ('"values": 16', '"values": 11'), "'values' = 12, and a row has room for 11; cut the sample"),
        (SOUNDS, ('"target": 1}', '"target": -1}'), "gives 'target' = -1; give a whole number, at least 0."),
        (SOUNDS, ('{"values": places,', '{"values": places + 1,'), "let size give the first dim"),
        (SOUNDS, ("places = len(", "places = 0 * len("), "and by its size and the first sample it is"),
        (SOUNDS, ("places = len(", "places = 1 // 0 * len("), "size('train', 0) fails: ZeroDivisionError"),
        (WORDS, ('"counted": places - 2', '"counted": places'), "targets other than -100, and its size counts"),
        (WORDS, ('"counted": places - 2', '"counted": 99'), "gives 'counted' = 99 of 3 targets"),
        (
            WORDS,
            ("places = 3 +", "places = int(torch.randint(2, ())) + 3 +"),
            "let it depend on split and index alone",
        ),
    ],
)
def test_a_file_whose_sizes_do_not_fit_is_refused_in_one_line(tmp_path, text, change, says):
    assert text.replace(*change) != text
    path = write_ragged(tmp_path, "mine", text.replace(*change))
    with pytest.raises(DataError) as refused:
        check_pure(open_samples(path), seed=0)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("data.source: ")


def test_other_sizes_and_capacities_are_other_samples(tmp_path):
    texts = WORDS, WORDS.replace("* 7 % 17", "* 8 % 17"), WORDS.replace("24, ", "25, ")
    # Files of their own: Python takes one of the same name, size and second for the same.
    files = (write_ragged(tmp_path, f"words{number}", text) for number, text in enumerate(texts))
    assert len({open_samples(file).digest() for file in files}) == 3
