"""Snapshots: state in memory that outlives its rank.

Each rank has a piece of shared memory. The launcher makes it and keeps it open; it has no name and no file, so that
nothing is left once all processes have ended, however they ended.

    header      for each slot: the step of its state, whether it is complete, whether to write it to disk, and its
                checksum
    table       JSON: the place of each piece of a global tensor in a slot, and a checkpoint's other files
    slot 0      weights and moments, in the layout of the rank's own buffers
    slot 1      the next snapshot goes into a slot that holds neither the newest complete one
    slot 2      nor one that is being written to disk
    slot 3      nor those that are being sent to another host, with several hosts: only there is a fourth

A rank marks a slot complete last, so an interrupted copy never counts. While a rank copies the state of step k, all
ranks have done step k, and so each has the complete state of an earlier step: k - ``snapshot_every``, if not k.

A slot's checksum is computed from the rank's own buffers during the copy. Every reader of a slot verifies it
(``state.snapshots.damage``): this detects errors of the copy, and bits that flipped later.
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
from superstep.numerics.loss_scale import LossScale
from superstep.state.manifest import Position
from superstep.state.tensor_piece import TensorPiece

SLOTS = 3
HOSTS_SLOTS = 4
"""With several hosts: the state that every other host has, and the next."""

EMPTY, WRITING, WHOLE = 0, 1, 2
KEPT, WANTED, ON_DISK, FAILED = 0, 1, 2, 3
"""Whether a slot goes to disk: no; requested; written; failed."""

State = tuple[int, int]
"""A copied state: its step, and the turn of the run. A rollback begins another turn."""

Field = Literal[
    "state",
    "step",
    "samples",
    "tokens",
    "loss_scale",
    "disk",
    "written_bytes",
    "microseconds",
    "turn",
    "is_held",
    "checksum",
]
_FIELDS: tuple[Field, ...] = get_args(Field)
_IDENTITY: tuple[Field, ...] = ("step", "samples", "tokens", "turn", "loss_scale")
"""Fields in the checksum of a slot, besides the words of its state."""

_IDENTITY_AT = 1 << 40
"""The index of the first of them: after the words of any state."""

NOTE_BYTES = 768
_NOTES = 1024
_WORD = struct.Struct("<Q")
_MODULUS = 1 << 64
_LAID_OUT, _TABLE_BYTES, _TABLE_CRC, _SLOT_BYTES, _SLOTS_AT, _SLOTS, _REQUESTED = range(0, 56, 8)
_REFUSED_STEP, _REFUSED_RANK, _FIRST = 56, 64, 72
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Handles:
    """References to the ranks' memories for other processes.

    Attributes:
        owner: the process that made them; it must be alive.
        numbers: its descriptors, by rank.
        first: the first of the ranks; others belong to other hosts.
    """

    owner: int
    numbers: tuple[int, ...]
    first: int = 0

    def of(self, rank: int) -> SnapshotMemory:
        """A rank's memory."""
        return SnapshotMemory(os.open(f"/proc/{self.owner}/fd/{self.numbers[rank - self.first]}", os.O_RDWR))


@dataclass(frozen=True, slots=True)
class DamagedSnapshot:
    """A snapshot that was not written to disk: the step of its state, and the rank with the damaged copy."""

    step: int
    rank: int


class SnapshotMemory:
    """One rank's shared memory. Closing it does not affect other processes that have it open."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._map: mmap.mmap | None = None

    def lay_out(self, table: Mapping[str, Any], slot_bytes: int, slots: int = SLOTS) -> None:
        """Set its size and its table; the slots are empty. An existing table must be equal."""
        self.lay_out_text(json.dumps(table).encode(), slot_bytes, slots)

    def lay_out_text(self, text: bytes, slot_bytes: int, slots: int) -> None:
        """``lay_out`` with a table as text."""
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
        """Whether its rank has written the table."""
        return os.fstat(self.handle).st_size > 0 and self._get(_LAID_OUT) == 1

    @property
    def view(self) -> mmap.mmap:
        """The whole memory."""
        if self._map is None:
            self._map = mmap.mmap(self.handle, os.fstat(self.handle).st_size)
        return self._map

    @property
    def slots(self) -> range:
        """Their numbers."""
        return range(self._get(_SLOTS))

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot."""
        return self._get(_SLOT_BYTES)

    @property
    def requested(self) -> int:
        """The step for another host; 0 without a request."""
        return self._get(_REQUESTED)

    def request(self, step: int) -> None:
        """Request that the state of a step is kept for another host, once it is copied."""
        self._put(_REQUESTED, step)

    def text(self) -> bytes:
        """The table as text.

        Raises:
            Fault: it is damaged.
        """
        if not self.has_table:
            raise Fault("the table of a snapshot's memory has other bits than were written; resume the run.")
        return self.view[PAGE : PAGE + self._get(_TABLE_BYTES)]

    @property
    def has_table(self) -> bool:
        """Whether the table has the bits that were written."""
        return zlib.crc32(self.view[PAGE : PAGE + self._get(_TABLE_BYTES)]) == self._get(_TABLE_CRC)

    def table(self) -> dict[str, Any]:
        """The parsed table."""
        table: dict[str, Any] = json.loads(self.text())
        return table

    def get(self, slot: int, field: Field) -> int:
        """A field of a slot."""
        return self._get(self._place(slot, field))

    def put(self, slot: int, field: Field, value: int) -> None:
        """Set a field of a slot."""
        self._put(self._place(slot, field), value)

    def note(self, slot: int) -> str:
        """The message about a slot from the process that writes checkpoints."""
        at = _NOTES + slot * NOTE_BYTES
        return bytes(self.view[at : at + NOTE_BYTES]).rstrip(b"\0").decode(errors="ignore")

    def put_note(self, slot: int, text: str) -> None:
        """Set the message about a slot; a longer text is cut."""
        at = _NOTES + slot * NOTE_BYTES
        self.view[at : at + NOTE_BYTES] = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")

    def position(self, slot: int) -> Position:
        """The position of a slot's state."""
        return Position(
            step=self.get(slot, "step"),
            samples=self.get(slot, "samples"),
            tokens=self.get(slot, "tokens"),
            loss_scale=LossScale.unpack(self.get(slot, "loss_scale")),
        )

    def put_position(self, slot: int, position: Position) -> None:
        """Set the position of a slot's state."""
        self.put(slot, "step", position.step)
        self.put(slot, "samples", position.samples)
        self.put(slot, "tokens", position.tokens)
        self.put(slot, "loss_scale", 0 if position.loss_scale is None else position.loss_scale.pack())

    def start(self, slot: int) -> int:
        """The first byte of a slot."""
        return self._get(_SLOTS_AT) + slot * self._get(_SLOT_BYTES)

    def values(self, slot: int, offset: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A view of ``count`` values of a slot, from a byte offset; writable."""
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=self.start(slot) + offset)

    def seal(self, slot: int, words: int) -> None:
        """Set a slot's checksum from the sum of its copied words; position and turn are set already."""
        self.put(slot, "checksum", (words + self._identity(slot)) % _MODULUS)

    def is_damaged(self, slot: int) -> bool:
        """Whether a slot has other bits than were copied. All of it is read."""
        return not (self.is_sealed(slot, int(checksum(self.words(slot)))) and self.has_table)

    def words(self, slot: int) -> torch.Tensor:
        """All words of a slot, int32."""
        count = self.slot_bytes // 4
        return torch.frombuffer(self.view, dtype=torch.int32, count=count, offset=self.start(slot))

    def is_sealed(self, slot: int, words: int) -> bool:
        """Whether this sum of words matches a slot's checksum."""
        return (words + self._identity(slot)) % _MODULUS == self.get(slot, "checksum")

    def _identity(self, slot: int) -> int:
        return sum(self.get(slot, field) * (2 * (_IDENTITY_AT + at) + 1) for at, field in enumerate(_IDENTITY))

    def whole(self) -> dict[int, int]:
        """The slot of each step with a complete state."""
        if not self.is_laid_out:
            return {}
        return {self.get(slot, "step"): slot for slot in self.slots if self.get(slot, "state") == WHOLE}

    def states(self, *, held: bool = False) -> dict[State, int]:
        """The slot of each complete state; with ``held``, only those kept for another host."""
        if not self.is_laid_out:
            return {}
        slots = [s for s in self.slots if self.get(s, "state") == WHOLE and (self.get(s, "is_held") or not held)]
        return {(self.get(slot, "step"), self.get(slot, "turn")): slot for slot in slots}

    def hold_only(self, steps: Iterable[int]) -> None:
        """Keep only the states of these steps for another host."""
        kept = set(steps)
        for slot in self.slots if self.is_laid_out else ():
            if self.get(slot, "step") not in kept:
                self.put(slot, "is_held", 0)

    def forget_after(self, step: int) -> list[int]:
        """Drop later states, and incomplete ones; their slots."""
        slots = self.slots if self.is_laid_out else ()
        gone = [s for s in slots if self.get(s, "state") != WHOLE or self.get(s, "step") > step]
        for slot in gone:
            self.void(slot)
        return gone

    def void(self, slot: int) -> None:
        """Empty a slot. If the table is damaged, all of them: the memory is laid out again."""
        self.put(slot, "state", EMPTY)
        self.put(slot, "disk", KEPT)
        self.put(slot, "is_held", 0)
        if not self.has_table:
            self._put(_LAID_OUT, 0)

    @property
    def refused(self) -> DamagedSnapshot | None:
        """The damaged snapshot that was not written to disk, until it is cleared."""
        step = self._get(_REFUSED_STEP)
        return DamagedSnapshot(step, self._get(_REFUSED_RANK)) if step else None

    def refuse(self, refused: DamagedSnapshot | None) -> None:
        """Set it, or clear it."""
        self._put(_REFUSED_RANK, 0 if refused is None else refused.rank)
        self._put(_REFUSED_STEP, 0 if refused is None else refused.step)

    def waiting(self) -> dict[int, int]:
        """The complete slot of each step requested on disk. Another slot may hold the same step, copied again."""
        if not self.is_laid_out:
            return {}
        slots = [slot for slot in self.slots if self.get(slot, "state") == WHOLE]
        return {self.get(slot, "step"): slot for slot in slots if self.get(slot, "disk") == WANTED}

    def free_slot(self) -> int | None:
        """The slot for the next snapshot; None while the disk or another host is behind, or a write is not confirmed
        yet.
        """
        whole = self.whole()
        newest = whole[max(whole)] if whole else None
        slots = (s for s in self.slots if s != newest and self.get(s, "disk") == KEPT and not self.get(s, "is_held"))
        return next(slots, None)

    def close(self) -> None:
        """Close it. Tensors of ``values`` keep the mapping."""
        os.close(self.handle)

    @staticmethod
    def _place(slot: int, field: Field) -> int:
        return _FIRST + 8 * (len(_FIELDS) * slot + _FIELDS.index(field))

    def _get(self, at: int) -> int:
        value: int = _WORD.unpack_from(self.view, at)[0]
        return value

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self.view, at, value)


def make_memories(ranks: int, first: int = 0) -> tuple[Handles, list[SnapshotMemory]]:
    """Make the memories of ``ranks`` ranks from ``first`` on, owned by this process."""
    handles = [os.memfd_create(f"superstep-rank-{first + rank}") for rank in range(ranks)]
    return Handles(os.getpid(), tuple(handles), first), [SnapshotMemory(handle) for handle in handles]


def common(memories: Sequence[SnapshotMemory]) -> int | None:
    """The newest step with a complete state on every rank."""
    steps = set.intersection(*(set(memory.whole()) for memory in memories)) if memories else set()
    return max(steps, default=None)


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "8bit"}
_NUMBERS = {name: dtype for dtype, name in _DTYPES.items()}


def describe_damage(step: int) -> str:
    """The message about a damaged slot."""
    return f"the copy of step {step} in memory has other bits than were copied"


def describe_pieces(pieces: Iterable[tuple[TensorPiece, int]]) -> list[dict[str, Any]]:
    """Pieces with their byte offsets in a slot, in the table's format."""
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
            "dtype": _DTYPES[piece.values.dtype],
        }
        for piece, offset in pieces
    ]


def pieces_of(memory: SnapshotMemory, slot: int) -> Iterator[TensorPiece]:
    """Pieces of global tensors in a rank's slot: views, no copies."""
    for entry in memory.table()["pieces"]:
        yield TensorPiece(
            kind=entry["kind"],
            name=entry["name"],
            shape=tuple(entry["shape"]),
            index=tuple(slice(low, high) for low, high in entry["index"]),
            low=entry["low"],
            values=memory.values(slot, entry["offset"], entry["count"], _NUMBERS[entry["dtype"]]),
            is_owner=entry["is_owner"],
        )


@dataclass(frozen=True, slots=True)
class WantedSnapshot:
    """A snapshot to write to disk: each rank's slot of one step."""

    position: Position
    slots: tuple[int, ...]


def oldest_wanted(memories: Sequence[SnapshotMemory]) -> WantedSnapshot | None:
    """The oldest snapshot requested on disk that is complete on every rank."""
    of_step = [memory.waiting() for memory in memories]
    steps = set.intersection(*(set(each) for each in of_step)) if of_step else set()
    if not steps:
        return None
    slots = tuple(each[min(steps)] for each in of_step)
    return WantedSnapshot(memories[0].position(slots[0]), slots)


def folder_of(memory: SnapshotMemory) -> Path:
    """Rank 0's folder of checkpoints."""
    return Path(memory.table()["folder"])
