"""A state's bytes, from the memory of one host to that of another, over a wire.

    sends      begin: which state, and of each rank what its memory is like ─►
               table 0 | slot 0 | table 1 | slot 1 | ...   in blocks       ─►   into a slot that holds nothing needed
               whole ──────────────────────────────────────────────────────►   only now are the slots marked as whole
                                                                       ◄──── kept

A rank may come to need the slot that is read from: then what was sent is void. Every frame has a proof of its bytes.
Each slot has a checksum, which both sides compare with what they have at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from superstep.launch.hosts.secure_channel import MOST_BYTES, PayloadKind, SecureChannel
from superstep.state.snapshots.damage import find_damaged
from superstep.state.snapshots.memory_snapshot import HOSTS_SLOTS, WHOLE, WRITING, SnapshotMemory, State

MOST_TABLE_BYTES = 2**30


class Void(Exception):
    """The state was not held long enough to be sent."""


class Spoilt(Void):
    """The state that was sent has other bits than were copied."""


class RateLimit:
    """Holds what is sent back to so many bytes a second; None holds nothing back."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until so many bytes may follow."""
        if self._bytes_per_s is None:
            return
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s) + count / self._bytes_per_s
        if self._free_s > now_s:
            time.sleep(self._free_s - now_s)


def send(wire: SecureChannel, memories: Sequence[SnapshotMemory], state: State, epoch: int, rate: RateLimit) -> None:
    """Send a state of some ranks, until the other side has it.

    Raises:
        Void: it is no longer there; the other side knows.
        Spoilt: it is damaged; likewise.
        OSError: the other side is gone.
    """
    slots = [memory.states().get(state) for memory in memories]
    full = [slot for slot in slots if slot is not None]
    if len(full) < len(memories):
        raise Void
    if not all(memory.has_table for memory in memories):
        raise Spoilt
    ranks = [
        {
            "samples": memory.get(slot, "samples"),
            "tokens": memory.get(slot, "tokens"),
            "checksum": memory.get(slot, "checksum"),
            "table_bytes": len(memory.text()),
            "slot_bytes": memory.slot_bytes,
        }
        for memory, slot in zip(memories, full, strict=True)
    ]
    wire.say({"say": "begin", "state": state, "epoch": epoch, "ranks": ranks})
    for memory, slot in zip(memories, full, strict=True):
        _send_bytes(wire, memory.text(), rate)
        low = memory.start(slot)
        with memoryview(memory.view) as view:
            _send_bytes(wire, view[low : low + memory.slot_bytes], rate)
    parts = list(zip(memories, full, strict=True))
    wrong = find_damaged(parts)
    is_there = all(memory.states().get(state) == slot for memory, slot in parts)  # and was, while it was read
    is_whole = is_there and not wrong
    wire.say({"say": "whole" if is_whole else "void"})
    is_kept = wire.hear().get("say") == "kept"
    if is_there and wrong:
        raise Spoilt
    if not (is_kept and is_whole):
        raise Void


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
    """Take one state in; None where it was void.

    Args:
        wire: from which the next message begins it.
        memories: of as many ranks; where they are not laid out they are.
        keep: told which state, and of which epoch, and given what marks it as whole; it may leave that.
        is_wanted: whether states of an epoch are; of an older one they may be cut otherwise.

    Raises:
        OSError: the other side is gone, or sends something else.
    """
    state, epoch, ranks = _read_start(wire, len(memories))
    if not is_wanted(epoch):
        raise ConnectionError(f"a copy of epoch {epoch}, which is over")
    slots = []
    for memory, rank in zip(memories, ranks, strict=True):
        if rank["table_bytes"] > MOST_TABLE_BYTES:
            raise ConnectionError(f"a table of {rank['table_bytes']} bytes")
        table = _receive_bytes(wire, bytearray(rank["table_bytes"]))
        if not memory.is_laid_out:
            memory.lay_out_text(bytes(table), rank["slot_bytes"], HOSTS_SLOTS)
        if memory.slot_bytes != rank["slot_bytes"]:
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
        memory.put(slot, "samples", rank["samples"])
        memory.put(slot, "tokens", rank["tokens"])
        memory.put(slot, "checksum", rank["checksum"])
    is_whole = wire.hear().get("say") == "whole" and not find_damaged(list(zip(memories, slots, strict=True)))

    def mark() -> None:
        for memory, slot in zip(memories, slots, strict=True):
            memory.put(slot, "is_held", 1)
            memory.put(slot, "state", WHOLE)

    if is_whole:
        keep(state, epoch, mark)
    wire.say({"say": "kept" if is_whole else "left"})
    return state if is_whole else None


def _read_start(wire: SecureChannel, count: int) -> tuple[State, int, list[dict[str, int]]]:
    """Which state comes, of which epoch, and of each of so many ranks what its memory is like."""
    begin = wire.hear()
    try:
        state: State = (int(begin["state"][0]), int(begin["state"][1]))
        epoch, ranks = int(begin["epoch"]), [{name: int(each[name]) for name in each} for each in begin["ranks"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConnectionError(f"a copy begins otherwise ({error!r})") from error
    if len(ranks) != count:
        raise ConnectionError(f"a copy of {len(ranks)} ranks, and {count} are expected")
    return state, epoch, ranks


def _receive_bytes(wire: SecureChannel, place: bytearray | memoryview) -> bytearray | memoryview:
    at = 0
    while at < len(place):
        kind, block = wire.receive()
        if kind is not PayloadKind.BLOCK or not block or at + len(block) > len(place):
            raise ConnectionError("a copy has other blocks than it should")
        place[at : at + len(block)] = block
        at += len(block)
    return place
