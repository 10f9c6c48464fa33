"""Python objects between all ranks: each one's value, and a barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
import torch.distributed as dist

from superstep.comm.codec import Codec
from superstep.comm.device import Device
from superstep.errors import Fault
from superstep.state.tensor_piece import bytes_of

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

LENGTH_BYTES = 8
FIRST_BYTES = 1024 - LENGTH_BYTES
"""Bytes of a message that go with its length. Most messages are shorter, and take one collective."""


def barrier(device: Device, group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank, or every rank of a group; on this rank's GPU, where NCCL would guess another."""
    dist.barrier(group, device_ids=None if device.kind == "cpu" else [device.index])


def world_group() -> dist.ProcessGroup | None:
    """The group of all ranks; None with one."""
    group = dist.group.WORLD
    return None if group is None or group.size() == 1 else group


def gather(value: T, form: TypeForm[T]) -> list[T]:
    """Every rank's value, in rank order, on every rank; for small values of plain data.

    Args:
        value: of this rank.
        form: its type; a message of any other is refused.

    Raises:
        Fault: a rank sent something else.
    """
    group = world_group()
    if group is None:
        return [value]
    codec: Codec[T] = Codec(form)
    messages = _gather_bytes(codec.encode(value), group)
    return [_decode(codec, message, rank, form) for rank, message in enumerate(messages)]


def _decode(codec: Codec[T], message: bytes, rank: int, form: object) -> T:
    try:
        return codec.decode(message)
    except msgspec.DecodeError as error:
        raise Fault(f"its message is no {form} ({error}); start all ranks from the same version.", rank=rank) from error


def _gather_bytes(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    length = len(message).to_bytes(LENGTH_BYTES, "little")
    heads = _gather_equal(length + message[:FIRST_BYTES], LENGTH_BYTES + FIRST_BYTES, group)
    lengths = [int.from_bytes(head[:LENGTH_BYTES], "little") for head in heads]
    longest = max(lengths) - FIRST_BYTES
    rests = _gather_equal(message[FIRST_BYTES:], longest, group) if longest > 0 else [b""] * len(heads)
    return [(head[LENGTH_BYTES:] + rest)[:count] for head, rest, count in zip(heads, rests, lengths, strict=True)]


def _gather_equal(data: bytes, count: int, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, each filled up to ``count`` bytes."""
    own = torch.frombuffer(bytearray(data.ljust(count, b"\0")), dtype=torch.uint8)
    if dist.get_backend(group) == "nccl":
        own = own.to(torch.device("cuda", torch.cuda.current_device()))
    every = own.new_empty(group.size(), count)
    dist.all_gather(list(every), own, group=group)
    return [bytes(bytes_of(each)) for each in every.cpu()]


@dataclass(frozen=True, slots=True)
class RankPeers:
    """The launched ranks, as ``state`` wants them."""

    rank: int
    size: int

    def gather(self, value: T, form: TypeForm[T]) -> list[T]:
        """Every rank's value, on every rank."""
        return gather(value, form)
