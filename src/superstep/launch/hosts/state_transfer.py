"""Sends the bytes of a state from one host's memory to another's, over a channel.

    sender     CopyBegins: which state, and each rank's memory layout ────────►
               table 0 | slot 0 | table 1 | slot 1 | ...   in blocks       ─►   into a free slot
               CopyEnds ───────────────────────────────────────────────────►   only now the slots are marked complete
                                                                       ◄──── CopyTaken

A rank may need the slot while it is read: then the transfer is void. Every frame is authenticated, and both sides
compare each slot's checksum at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from superstep.comm.codec import Codec
from superstep.launch.hosts.secure_channel import MOST_BYTES, PayloadKind, SecureChannel
from superstep.state.snapshots.damage import find_damaged
from superstep.state.snapshots.memory_snapshot import HOSTS_SLOTS, WHOLE, WRITING, SnapshotMemory, State

MOST_TABLE_BYTES = 2**30

Count = Annotated[int, msgspec.Meta(ge=0)]


class FetchCopy(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A host wants the state of its ranks back."""

    state: State


class HeldCopies(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The states of the sender's ranks that the other host has already."""

    states: frozenset[State]


class RankCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The copy of one rank: its position, its checksum, and the bytes of its table and of its slot."""

    samples: Count
    tokens: Count
    loss_scale: Count
    checksum: Count
    table_bytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_TABLE_BYTES)]
    slot_bytes: Count


class CopyBegins(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A copy follows, in blocks."""

    state: State
    epoch: int
    ranks: tuple[RankCopy, ...]


class CopyEnds(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All blocks have been sent; ``is_whole``: the state was held all the while, undamaged."""

    is_whole: bool


class CopyTaken(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver's answer: whether it keeps the copy."""

    is_kept: bool


FETCH: Codec[FetchCopy] = Codec(FetchCopy)
HELD: Codec[HeldCopies] = Codec(HeldCopies)
BEGINS: Codec[CopyBegins] = Codec(CopyBegins)
ENDS: Codec[CopyEnds] = Codec(CopyEnds)
TAKEN: Codec[CopyTaken] = Codec(CopyTaken)


class StateDropped(Exception):
    """The state was not held long enough to send it."""


class StateCorrupt(StateDropped):
    """The state's bits are not those that were copied."""


class RateLimit:
    """Limits sending to some bytes a second; None for no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes may follow."""
        if self._bytes_per_s is None:
            return
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s) + count / self._bytes_per_s
        if self._free_s > now_s:
            time.sleep(self._free_s - now_s)


def send(wire: SecureChannel, memories: Sequence[SnapshotMemory], state: State, epoch: int, rate: RateLimit) -> None:
    """Send a state of some ranks; returns when the other side has it.

    Raises:
        Void: it is no longer held; the other side knows.
        Spoilt: it is damaged; the other side knows.
        OSError: the other side is gone.
    """
    slots = [memory.states().get(state) for memory in memories]
    full = [slot for slot in slots if slot is not None]
    if len(full) < len(memories):
        raise StateDropped
    if not all(memory.has_table for memory in memories):
        raise StateCorrupt
    ranks = tuple(
        RankCopy(
            samples=memory.get(slot, "samples"),
            loss_scale=memory.get(slot, "loss_scale"),
            tokens=memory.get(slot, "tokens"),
            checksum=memory.get(slot, "checksum"),
            table_bytes=len(memory.text()),
            slot_bytes=memory.slot_bytes,
        )
        for memory, slot in zip(memories, full, strict=True)
    )
    wire.say(CopyBegins(state, epoch, ranks))
    for memory, slot in zip(memories, full, strict=True):
        _send_bytes(wire, memory.text(), rate)
        low = memory.start(slot)
        with memoryview(memory.view) as view:
            _send_bytes(wire, view[low : low + memory.slot_bytes], rate)
    parts = list(zip(memories, full, strict=True))
    wrong = find_damaged(parts)
    is_there = all(memory.states().get(state) == slot for memory, slot in parts)  # and was, while it was read
    is_whole = is_there and not wrong
    wire.say(CopyEnds(is_whole))
    is_kept = wire.hear(TAKEN).is_kept
    if is_there and wrong:
        raise StateCorrupt
    if not (is_kept and is_whole):
        raise StateDropped


def _send_bytes(wire: SecureChannel, data: bytes | memoryview, rate: RateLimit) -> None:
    for low in range(0, len(data), MOST_BYTES):
        block = data[low : low + MOST_BYTES]
        rate.take(len(block))
        wire.send(PayloadKind.BLOCK, block)


def receive(
    wire: SecureChannel,
    memories: Sequence[SnapshotMemory],
    keep: Callable[[State, int, Callable[[], None]], None],
    is_wanted: Callable[[int], bool] = lambda _: True,
) -> State | None:
    """Receive one state; None where it was void.

    Args:
        wire: its next message begins the state.
        memories: one for each rank; laid out here if they are not.
        keep: called with state, epoch, and a function that marks it complete; may decide not to.
        is_wanted: whether states of an epoch are wanted; older ones may have another cut.

    Raises:
        OSError: the other side is gone, or sends something else.
    """
    begins = wire.hear(BEGINS)
    state, epoch, ranks = begins.state, begins.epoch, begins.ranks
    if len(ranks) != len(memories):
        raise ConnectionError(f"a copy of {len(ranks)} ranks, and {len(memories)} are expected")
    if not is_wanted(epoch):
        raise ConnectionError(f"a copy of epoch {epoch}, which is over")
    slots = []
    for memory, rank in zip(memories, ranks, strict=True):
        table = _receive_bytes(wire, bytearray(rank.table_bytes))
        if not memory.is_laid_out:
            memory.lay_out_text(bytes(table), rank.slot_bytes, HOSTS_SLOTS)
        if memory.slot_bytes != rank.slot_bytes:
            raise ConnectionError("a copy of another size than before")
        slot = memory.free_slot()
        if slot is None:
            raise ConnectionError("there is no room for another copy")
        memory.put(slot, "state", WRITING)
        slots.append(slot)
        low = memory.start(slot)
        with memoryview(memory.view) as view, view[low : low + memory.slot_bytes] as place:
            _receive_bytes(wire, place)
        memory.put(slot, "step", state[0])
        memory.put(slot, "turn", state[1])
        memory.put(slot, "samples", rank.samples)
        memory.put(slot, "tokens", rank.tokens)
        memory.put(slot, "loss_scale", rank.loss_scale)
        memory.put(slot, "checksum", rank.checksum)
    is_whole = wire.hear(ENDS).is_whole and not find_damaged(list(zip(memories, slots, strict=True)))

    def mark() -> None:
        for memory, slot in zip(memories, slots, strict=True):
            memory.put(slot, "is_held", 1)
            memory.put(slot, "state", WHOLE)

    if is_whole:
        keep(state, epoch, mark)
    wire.say(CopyTaken(is_whole))
    return state if is_whole else None


def _receive_bytes(wire: SecureChannel, place: bytearray | memoryview) -> bytearray | memoryview:
    at = 0
    while at < len(place):
        kind, block = wire.receive()
        if kind is not PayloadKind.BLOCK or not block or at + len(block) > len(place):
            raise ConnectionError("a copy has other blocks than it should")
        place[at : at + len(block)] = block
        at += len(block)
    return place
