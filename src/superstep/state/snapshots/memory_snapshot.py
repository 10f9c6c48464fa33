"""Snapshots: the state in memory that outlives the rank it is of.

Each rank has a piece of shared memory. The launcher makes it and keeps it open; it has no name and no file, so that
nothing of it is left once all processes have ended, however they did.

    header      for each slot: which step's state it holds, whether all of it, whether the disk shall have it too, and
                its checksum
    table       JSON: where in a slot each piece of a global tensor lies, and what a checkpoint has beside
    slot 0      weights and moments, as the rank's own buffers have them
    slot 1      the next snapshot goes into a slot that holds neither the newest whole one
    slot 2      nor one that is on its way to the disk
    slot 3      nor those that are on their way to another host, where there are several: only there is a fourth

A rank writes a slot's state last, so what a kill interrupts is never taken for whole. While a rank copies the state of
step k, all ranks have done step k, and so each holds that of an earlier step, whole: k - ``snapshot_every``, if not k.

A slot's checksum is made of the rank's own buffers while they are copied. Whoever uses a slot compares it
(``state.snapshots.damage``): an error of the copy is seen, and a bit that has flipped since.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from superstep.errors import Fault
from superstep.kernels.checksum import checksum
from superstep.state.manifest import Position
from superstep.state.tensor_piece import TensorPiece

SLOTS = 3
HOSTS_SLOTS = 4
"""Where states go to another host: the one that every other host has, and the next."""

EMPTY, WRITING, WHOLE = 0, 1, 2
KEPT, WANTED, ON_DISK, FAILED = 0, 1, 2, 3
"""Whether the disk shall have a slot: no; yes; it has; it cannot."""

State = tuple[int, int]
"""A state that was copied: after which step, and in which turn of the run. One that goes back takes another turn."""

Field = Literal[
    "state", "step", "samples", "tokens", "disk", "written_bytes", "microseconds", "turn", "is_held", "checksum"
]
_FIELDS: tuple[Field, ...] = get_args(Field)
_IDENTITY: tuple[Field, ...] = ("step", "samples", "tokens", "turn")
"""What the checksum of a slot has beside the words of its state."""

_IDENTITY_AT = 1 << 40
"""The place of the first of them: behind the words of any state."""

NOTE_BYTES = 768
_NOTES = 1024
_WORD = struct.Struct("<Q")
_MODULUS = 1 << 64
_LAID_OUT, _TABLE_BYTES, _TABLE_CRC, _SLOT_BYTES, _SLOTS_AT, _SLOTS, _ASKED = range(0, 56, 8)
_REFUSED_STEP, _REFUSED_RANK, _FIRST = 56, 64, 72
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Handles:
    """The ranks' memories, as a process that did not make them finds them.

    Attributes:
        owner: the number of the process that did, and lives.
        numbers: its descriptors, by rank.
        first: the first of the ranks; others are another host's.
    """

    owner: int
    numbers: tuple[int, ...]
    first: int = 0

    def of(self, rank: int) -> SnapshotMemory:
        """A rank's memory."""
        return SnapshotMemory(os.open(f"/proc/{self.owner}/fd/{self.numbers[rank - self.first]}", os.O_RDWR))


@dataclass(frozen=True, slots=True)
class DamagedSnapshot:
    """A snapshot that the disk did not get: the step of its state, and the rank whose copy was damaged."""

    step: int
    rank: int


class SnapshotMemory:
    """One rank's shared memory. Closing it leaves what is in it to those that have it open."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._map: mmap.mmap | None = None

    def lay_out(self, table: Mapping[str, Any], slot_bytes: int, slots: int = SLOTS) -> None:
        """Give it its size and its table; the slots are empty. A table that is there already must be this one."""
        self.lay_out_text(json.dumps(table).encode(), slot_bytes, slots)

    def lay_out_text(self, text: bytes, slot_bytes: int, slots: int) -> None:
        """``lay_out``, of a table that is text already."""
        at = -(-(PAGE + len(text)) // PAGE) * PAGE
        room = -(-slot_bytes // PAGE) * PAGE
        os.ftruncate(self.handle, at + slots * room)
        self._put(_TABLE_BYTES, len(text))
        self._put(_TABLE_CRC, zlib.crc32(text))
        self._put(_SLOT_BYTES, room)
        self._put(_SLOTS_AT, at)
        self._put(_SLOTS, slots)
        self.view[PAGE : PAGE + len(text)] = text
        self._put(_LAID_OUT, 1)

    @property
    def is_laid_out(self) -> bool:
        """Whether its rank has come so far."""
        return os.fstat(self.handle).st_size > 0 and self._get(_LAID_OUT) == 1

    @property
    def view(self) -> mmap.mmap:
        """All of it."""
        if self._map is None:
            self._map = mmap.mmap(self.handle, os.fstat(self.handle).st_size)
        return self._map

    @property
    def slots(self) -> range:
        """Their numbers."""
        return range(self._get(_SLOTS))

    @property
    def slot_bytes(self) -> int:
        """Of each slot."""
        return self._get(_SLOT_BYTES)

    @property
    def asked(self) -> int:
        """The step whose state another host shall have; 0 while there is none."""
        return self._get(_ASKED)

    def ask(self, step: int) -> None:
        """Have the state of a step held for another host, once it is copied."""
        self._put(_ASKED, step)

    def text(self) -> bytes:
        """The table as it is written.

        Raises:
            Fault: it has other bits now.
        """
        if not self.has_table:
            raise Fault("the table of a snapshot's memory has other bits than were written; resume the run.")
        return self.view[PAGE : PAGE + self._get(_TABLE_BYTES)]

    @property
    def has_table(self) -> bool:
        """Whether the table has the bits that were written."""
        return zlib.crc32(self.view[PAGE : PAGE + self._get(_TABLE_BYTES)]) == self._get(_TABLE_CRC)

    def table(self) -> dict[str, Any]:
        """What its rank wrote there."""
        table: dict[str, Any] = json.loads(self.text())
        return table

    def get(self, slot: int, field: Field) -> int:
        """A number of a slot."""
        return self._get(self._place(slot, field))

    def put(self, slot: int, field: Field, value: int) -> None:
        """Set a number of a slot."""
        self._put(self._place(slot, field), value)

    def note(self, slot: int) -> str:
        """What the process that writes checkpoints has said of a slot."""
        at = _NOTES + slot * NOTE_BYTES
        return bytes(self.view[at : at + NOTE_BYTES]).rstrip(b"\0").decode(errors="ignore")

    def put_note(self, slot: int, text: str) -> None:
        """Say something of a slot; the end of a longer text is left out."""
        at = _NOTES + slot * NOTE_BYTES
        self.view[at : at + NOTE_BYTES] = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")

    def position(self, slot: int) -> Position:
        """Where training stood."""
        return Position(step=self.get(slot, "step"), samples=self.get(slot, "samples"), tokens=self.get(slot, "tokens"))

    def start(self, slot: int) -> int:
        """The first byte of a slot."""
        return self._get(_SLOTS_AT) + slot * self._get(_SLOT_BYTES)

    def values(self, slot: int, offset: int, count: int) -> torch.Tensor:
        """So many fp32 values of a slot, from a byte of it on; writing to them writes there."""
        return torch.frombuffer(self.view, dtype=torch.float32, count=count, offset=self.start(slot) + offset)

    def seal(self, slot: int, words: int) -> None:
        """Note the checksum of the words that were copied into a slot, whose position and turn are set."""
        self.put(slot, "checksum", (words + self._identity(slot)) % _MODULUS)

    def is_damaged(self, slot: int) -> bool:
        """Whether a slot has other bits than were copied. All of it is read."""
        return not (self.is_sealed(slot, int(checksum(self.words(slot)))) and self.has_table)

    def words(self, slot: int) -> torch.Tensor:
        """All of a slot, int32."""
        count = self.slot_bytes // 4
        return torch.frombuffer(self.view, dtype=torch.int32, count=count, offset=self.start(slot))

    def is_sealed(self, slot: int, words: int) -> bool:
        """Whether this is the checksum of the words that were copied into a slot."""
        return (words + self._identity(slot)) % _MODULUS == self.get(slot, "checksum")

    def _identity(self, slot: int) -> int:
        return sum(self.get(slot, field) * (2 * (_IDENTITY_AT + at) + 1) for at, field in enumerate(_IDENTITY))

    def whole(self) -> dict[int, int]:
        """The slot of each step whose state is whole."""
        if not self.is_laid_out:
            return {}
        return {self.get(slot, "step"): slot for slot in self.slots if self.get(slot, "state") == WHOLE}

    def states(self, *, held: bool = False) -> dict[State, int]:
        """The slot of each state that is whole; of those alone that are held for another host, if so asked."""
        if not self.is_laid_out:
            return {}
        slots = [s for s in self.slots if self.get(s, "state") == WHOLE and (self.get(s, "is_held") or not held)]
        return {(self.get(slot, "step"), self.get(slot, "turn")): slot for slot in slots}

    def hold_only(self, steps: Iterable[int]) -> None:
        """Hold no state of another step for another host."""
        kept = set(steps)
        for slot in self.slots if self.is_laid_out else ():
            if self.get(slot, "step") not in kept:
                self.put(slot, "is_held", 0)

    def forget_after(self, step: int) -> list[int]:
        """Void what is of later steps, and what is not whole; the slots that it was in."""
        slots = self.slots if self.is_laid_out else ()
        gone = [s for s in slots if self.get(s, "state") != WHOLE or self.get(s, "step") > step]
        for slot in gone:
            self.void(slot)
        return gone

    def void(self, slot: int) -> None:
        """Have nothing in a slot. Where the table is damaged, nothing in any: the memory is laid out again."""
        self.put(slot, "state", EMPTY)
        self.put(slot, "disk", KEPT)
        self.put(slot, "is_held", 0)
        if not self.has_table:
            self._put(_LAID_OUT, 0)

    @property
    def refused(self) -> DamagedSnapshot | None:
        """The snapshot that the disk was to have and did not get, as it was damaged; until it is forgotten."""
        step = self._get(_REFUSED_STEP)
        return DamagedSnapshot(step, self._get(_REFUSED_RANK)) if step else None

    def refuse(self, refused: DamagedSnapshot | None) -> None:
        """Note it, or forget it."""
        self._put(_REFUSED_RANK, 0 if refused is None else refused.rank)
        self._put(_REFUSED_STEP, 0 if refused is None else refused.step)

    def waiting(self) -> dict[int, int]:
        """The whole slot of each step that the disk shall have. Another slot may hold the same step, copied again."""
        if not self.is_laid_out:
            return {}
        slots = [slot for slot in self.slots if self.get(slot, "state") == WHOLE]
        return {self.get(slot, "step"): slot for slot in slots if self.get(slot, "disk") == WANTED}

    def free_slot(self) -> int | None:
        """Where the next snapshot may go; None while the disk or another host is behind, or nobody has noted that it is
        not, or that a slot could not be written.
        """
        whole = self.whole()
        newest = whole[max(whole)] if whole else None
        slots = (s for s in self.slots if s != newest and self.get(s, "disk") == KEPT and not self.get(s, "is_held"))
        return next(slots, None)

    def close(self) -> None:
        """Let go of it. Tensors of ``values`` keep the mapping."""
        os.close(self.handle)

    @staticmethod
    def _place(slot: int, field: Field) -> int:
        return _FIRST + 8 * (len(_FIELDS) * slot + _FIELDS.index(field))

    def _get(self, at: int) -> int:
        value: int = _WORD.unpack_from(self.view, at)[0]
        return value

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self.view, at, value)


def made(ranks: int, first: int = 0) -> tuple[Handles, list[SnapshotMemory]]:
    """Memory for so many ranks, from a first one on, owned by this process."""
    handles = [os.memfd_create(f"superstep-rank-{first + rank}") for rank in range(ranks)]
    return Handles(os.getpid(), tuple(handles), first), [SnapshotMemory(handle) for handle in handles]


def common(memories: Sequence[SnapshotMemory]) -> int | None:
    """The newest step whose state every rank has whole."""
    steps = set.intersection(*(set(memory.whole()) for memory in memories)) if memories else set()
    return max(steps, default=None)


def damaged_text(step: int) -> str:
    """What is said of a slot that is damaged."""
    return f"the copy of step {step} in memory has other bits than were copied"


def describe_pieces(pieces: Iterable[tuple[TensorPiece, int]]) -> list[dict[str, Any]]:
    """Pieces, each with its byte in a slot, as a table has them."""
    return [
        {
            "kind": piece.kind,
            "name": piece.name,
            "shape": list(piece.shape),
            "index": [list(cut.indices(size)[:2]) for cut, size in zip(piece.index, piece.shape, strict=True)],
            "low": piece.low,
            "count": piece.values.numel(),
            "offset": offset,
            "is_owner": piece.is_owner,
        }
        for piece, offset in pieces
    ]


def pieces_of(memory: SnapshotMemory, slot: int) -> Iterator[TensorPiece]:
    """What a rank's slot holds of the global tensors: no copy of it."""
    for entry in memory.table()["pieces"]:
        yield TensorPiece(
            kind=entry["kind"],
            name=entry["name"],
            shape=tuple(entry["shape"]),
            index=tuple(slice(low, high) for low, high in entry["index"]),
            low=entry["low"],
            values=memory.values(slot, entry["offset"], entry["count"]),
            is_owner=entry["is_owner"],
        )


@dataclass(frozen=True, slots=True)
class WantedSnapshot:
    """A snapshot that the disk shall have: each rank's slot of one step."""

    position: Position
    slots: tuple[int, ...]


def oldest_wanted(memories: Sequence[SnapshotMemory]) -> WantedSnapshot | None:
    """The oldest snapshot that the disk shall have and that every rank has whole."""
    of_step = [memory.waiting() for memory in memories]
    steps = set.intersection(*(set(each) for each in of_step)) if of_step else set()
    if not steps:
        return None
    slots = tuple(each[min(steps)] for each in of_step)
    return WantedSnapshot(memories[0].position(slots[0]), slots)


def folder_of(memory: SnapshotMemory) -> Path:
    """Where rank 0 wants its checkpoints."""
    return Path(memory.table()["folder"])
