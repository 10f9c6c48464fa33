"""page_layout: where in a rank's page of shared memory each record lies.

    field            who writes it               what it is
    beat             ``monitor.status_page``           what the host does now
    tick             its ticker                  whether Python runs
    expected         ``monitor.status_page``           what a step was predicted to take
    words_used       ``monitor.flight_recorder``            bytes of the words behind the page
    process          ``monitor.status_page``           the rank's process, and where its stacks go
    sizes_count      ``monitor.memory_history``        how many sizes there are
    sizes            ``monitor.memory_history``        resident bytes of the process over time
    gpu              ``monitor.gpu_progress``    how far the GPU has come

Words are of 8 bytes and aligned, so that each is stored and loaded at once; a record of several may be read while it
is written.
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
"""How often a record is read again that changes meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordField:
    """Records of one kind, one behind the other.

    Attributes:
        name: of the field.
        offset_bytes: of the first record, from the begin of the page.
        record: what one is packed as.
        count: how many there is room for.
    """

    name: str
    offset_bytes: int
    record: Struct
    count: int = 1

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.offset_bytes + self.count * self.record.size

    def write(self, view: mmap.mmap, *values: int | bytes, index: int = 0) -> None:
        """Write a record."""
        self.record.pack_into(view, self.offset_bytes + index * self.record.size, *values)

    def read(self, view: mmap.mmap, index: int = 0) -> tuple[Any, ...]:
        """The values of a record."""
        return self.record.unpack_from(view, self.offset_bytes + index * self.record.size)

    def read_whole(self, view: mmap.mmap) -> tuple[Any, ...]:
        """The same of the first record; it is read again where it is just being written."""
        values = self.read(view)
        for _ in range(_READS):
            again = self.read(view)
            if again == values:
                break
            values = again
        return values


def check_fields(*fields: RecordField) -> tuple[RecordField, ...]:
    """The fields, in the order of their places; an AssertionError where one is not in the page, or in another."""
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
"""All of them."""
