"""The page of a rank: its fields lie apart, and each reads what was written into it and into no other."""

from __future__ import annotations

import mmap
from dataclasses import replace
from struct import Struct

import pytest

from superstep.monitor import page_layout
from superstep.monitor.page_layout import FIELDS, PAGE_BYTES, SIZES, RecordField, check_fields


def field(offset_bytes, words=2, count=1):
    return RecordField(name=f"at {offset_bytes}", offset_bytes=offset_bytes, record=Struct(f"<{words}Q"), count=count)


def test_fields_that_touch_are_accepted_in_the_order_of_their_places():
    assert [each.offset_bytes for each in check_fields(field(16), field(0), field(PAGE_BYTES - 16))] == [0, 16, 4080]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([field(16), field(8)], "at 8 and at 16 overlap"),
        ([field(0, words=9), field(8)], "at 0 and at 8 overlap"),
        ([field(24), field(0, count=2)], "at 0 and at 24 overlap"),
        ([field(64), field(64)], "at 64 and at 64 overlap"),
        ([field(PAGE_BYTES - 8)], "at 4088 is not within the page of 4096 bytes"),
        ([field(-16)], "at -16 is not within the page"),
        ([field(12)], "at 12 does not begin at a word of 8 bytes"),
    ],
)
def test_fields_that_overlap_or_leave_the_page_are_refused(fields, said):
    with pytest.raises(AssertionError, match=said):
        check_fields(*fields)


def test_every_field_is_checked():
    assert {id(each) for each in vars(page_layout).values() if isinstance(each, RecordField)} == set(map(id, FIELDS))
    grown = [replace(each, count=SIZES.count + 1) if each is SIZES else each for each in FIELDS]
    with pytest.raises(AssertionError, match="sizes and gpu overlap"):
        check_fields(*grown)


def test_what_is_written_into_a_field_is_read_from_it_alone():
    view = mmap.mmap(-1, PAGE_BYTES)
    blank = {each.name: each.record.unpack(bytes(each.record.size)) for each in FIELDS}
    written = {each.name: each.record.unpack(bytes([at]) * each.record.size) for at, each in enumerate(FIELDS, 1)}
    for at, each in enumerate(FIELDS):
        assert all(later.read(view) == blank[later.name] for later in FIELDS[at:])
        for index in range(each.count):
            each.write(view, *written[each.name], index=index)
    for each in FIELDS:
        assert {each.read(view, index) for index in range(each.count)} == {written[each.name]}
        assert each.read_whole(view) == written[each.name]
