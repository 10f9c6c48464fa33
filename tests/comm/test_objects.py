"""Messages between all ranks: plain data of one form, in bytes that run nothing; an error in a form of its own."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from superstep.comm import objects
from superstep.comm.codec import Codec
from superstep.comm.objects import FIRST_BYTES, gather
from superstep.errors import (
    ConfigError,
    DamagedCheckpoint,
    DiskFault,
    ErrorMessage,
    Fault,
    RankLost,
    StateError,
    SuperstepError,
)

pytestmark = pytest.mark.multiproc


@dataclass(frozen=True, slots=True, order=True)
class Part:
    name: str
    block: tuple[tuple[int, int], ...]


PART = Part("a", ((0, 1), (2, 3)))
VALUES = {
    "a number": (2**63, int),
    "none": (None, float | None),
    "a fraction": (0.1, float),
    "a path that is no text": (Path(os.fsdecode(b"/run/\xff")), Path | None),
    "tuples": ((1, (2.5, "é")), tuple[int, tuple[float, str]]),
    "a set": ({1, 2}, set[int]),
    "by part": ({(PART, 3): [1, -(2**63)]}, dict[tuple[Part, int], list[int]]),
    "bytes": (b"\x00\xff", bytes),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name):
    value, form = VALUES[name]
    codec = Codec(form)
    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize("value", [torch.ones(2), torch.float32, ValueError("x"), torch.add, Part])
def test_what_is_no_plain_data_is_not_sent(value):
    with pytest.raises(TypeError, match="no plain data"):
        Codec(object).encode(value)


ERRORS = [
    SuperstepError("any"),
    ConfigError("zero = 3 is not one of [0, 1]"),
    StateError("/run/\udcff is no run"),
    DamagedCheckpoint("step-3 is damaged"),
    Fault("broken", rank=3, host="a", step=7, instruction="forward 2"),
    DiskFault("no room", step=2),
    RankLost("killed", rank=1),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_with_its_fields(error):
    if isinstance(error, Fault):
        error.said, error.saved_in = "what ranks did", "/elsewhere"
    codec = Codec(ErrorMessage)
    found = codec.decode(codec.encode(ErrorMessage.of(error))).error()
    assert type(found) is type(error)
    assert str(found) == str(error).replace("\udcff", "\\udcff")
    assert vars(found) == vars(error)
    if isinstance(error, Fault) and error.rank < 0:
        assert str(found.on(4)) == str(error.on(4))


class OtherFault(Fault):
    """One that the tree does not have."""


def test_an_error_of_another_module_comes_back_as_its_base():
    found = ErrorMessage.of(OtherFault("gone", rank=1)).error()
    assert (type(found), str(found)) == (Fault, "rank 1: gone")


def test_an_unknown_error_is_refused():
    with pytest.raises(ValueError, match="'KeyError' is no error of this version"):
        ErrorMessage("KeyError", "x", {}).error()


LENGTHS = (0, FIRST_BYTES - 20, FIRST_BYTES - 3, FIRST_BYTES, 5 * FIRST_BYTES)


def exchanged(rank, world):
    """Texts of each length; on rank 0 one character less."""
    return [gather("x" * max(0, length - (rank == 0)), str) for length in LENGTHS]


def test_messages_of_any_length_reach_every_rank(pool):
    for found in pool.run(3, exchanged):
        assert [[len(each) for each in texts] for texts in found] == [
            [max(0, length - 1), length, length] for length in LENGTHS
        ]


def of_another_form(rank, world):
    try:
        gather(7 if rank == 1 else "a", str)
    except Fault as fault:
        return str(fault)


def test_a_message_of_another_form_is_refused_with_its_sender(pool):
    for text in pool.run(2, of_another_form):
        assert text.startswith("rank 1: its message is no <class 'str'> (Expected `str`, got `int`)")


class Runs:
    def __reduce__(self):
        return os._exit, (3,)


def pickled(rank, world):
    """Rank 1 sends bytes that would end a process which unpickles them."""
    if rank == 1:
        objects._gather_bytes(pickle.dumps(Runs()), dist.group.WORLD)
        return ""
    try:
        gather("a", str)
    except Fault as fault:
        return str(fault)


def test_a_pickle_is_refused_and_does_not_run(pool):
    assert pool.run(2, pickled)[0].startswith("rank 1: its message is no")
