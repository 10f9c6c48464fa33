"""Messages between processes: what is read is one of the forms that are expected, of this version."""

import pickle

import msgspec
import pytest

from superstep.comm.codec import VERSION, Codec


class Begin(msgspec.Struct, frozen=True, tag=True):
    step: int
    name: str = ""


class End(msgspec.Struct, frozen=True, tag=True):
    """Nothing more."""


MESSAGES = Codec(Begin | End)


@pytest.mark.parametrize("message", [Begin(3, "é"), Begin(-1), End()])
def test_a_message_comes_back_as_bytes_and_as_numbers(message):
    assert MESSAGES.decode(MESSAGES.encode(message)) == message
    assert MESSAGES.from_numbers(MESSAGES.to_numbers(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes([VERSION]),
        pickle.dumps(End()),
        bytes([VERSION + 1]) + MESSAGES.encode(End())[1:],
        MESSAGES.encode(End())[1:],
        MESSAGES.encode(Begin(1))[:-1],
        bytes([VERSION]) + msgspec.msgpack.encode({"type": "Other"}),
        bytes([VERSION]) + msgspec.msgpack.encode({"type": "Begin", "step": "3"}),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        MESSAGES.decode(data)
