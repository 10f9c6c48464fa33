"""The layout of a rank's status page: where each record lies.

    field            written by                  what it is
    beat             ``monitor.status_page``     what the host does now
    tick             its ticker                  whether Python runs
    expected         ``monitor.status_page``     the predicted time of a step
    words_used       ``monitor.flight_recorder`` bytes of the words after the page
    process          ``monitor.status_page``     the rank's process, and where its stacks go
    sizes_count      ``monitor.memory_history``  the number of sizes
    sizes            ``monitor.memory_history``  resident bytes of the process over time
    gpu              ``monitor.gpu_progress``    how far the GPU has come

Words have 8 bytes and are aligned, so each is stored and loaded at once; a record of several words may be read while it
is being written.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import Any

from superstep.monitor.activity import TEXT_BYTES

PAGE_BYTES = 4096

WORD_BYTES = 8

_READS = 8
"""How often a record that changes meanwhile is read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordField:
    """Records of one kind, one after the other.

    Attributes:
        offset_bytes: of the first record in the page.
        record: the format of one.
        count: the most records.
    """

    name: str
    offset_bytes: int
    record: Struct
    count: int = 1

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.count * self.record.size

    def write(self, view: mmap.mmap, *values: int | bytes, index: int = 0) -> None:
        self.record.pack_into(view, self.offset_bytes + index * self.record.size, *values)

    def read(self, view: mmap.mmap, index: int = 0) -> tuple[Any, ...]:
        return self.record.unpack_from(view, self.offset_bytes + index * self.record.size)

    def read_whole(self, view: mmap.mmap) -> tuple[Any, ...]:
        """Read the first record; read again while it is being written."""
        values = self.read(view)
        for _ in range(_READS):
            again = self.read(view)
            if again == values:
                break
            values = again
        return values


def check_fields(*fields: RecordField) -> tuple[RecordField, ...]:
    """The fields, in the order of their places; raises AssertionError where they overlap or leave the page."""
    ordered = sorted(fields, key=lambda field: field.offset_bytes)
    for field in ordered:
        is_inside = field.offset_bytes >= 0 and field.end_bytes <= PAGE_BYTES
        assert is_inside, f"{field.name} is not within the page of {PAGE_BYTES} bytes"
        assert field.offset_bytes % WORD_BYTES == 0, f"{field.name} does not begin at a word of {WORD_BYTES} bytes"
    for first, second in pairwise(ordered):
        assert first.end_bytes <= second.offset_bytes, f"{first.name} and {second.name} overlap"
    return tuple(ordered)


BEAT = RecordField(name="beat", offset_bytes=0, record=Struct(f"<9Q{TEXT_BYTES}s"))
TICK = RecordField(name="tick", offset_bytes=512, record=Struct("<3Q"))
EXPECTED = RecordField(name="expected", offset_bytes=1024, record=Struct("<Q"))
WORDS_USED = RecordField(name="words_used", offset_bytes=1032, record=Struct("<Q"))
PROCESS = RecordField(name="process", offset_bytes=1040, record=Struct("<2Q"))
SIZES_COUNT = RecordField(name="sizes_count", offset_bytes=2040, record=Struct("<Q"))
SIZES = RecordField(name="sizes", offset_bytes=2048, record=Struct("<2Q"), count=64)
GPU = RecordField(name="gpu", offset_bytes=3072, record=Struct(f"<10Q{TEXT_BYTES}s"))

FIELDS = check_fields(BEAT, TICK, EXPECTED, WORDS_USED, PROCESS, SIZES_COUNT, SIZES, GPU)
