"""Packing: items of given sizes into few sequences, none of them cut.

Best fit decreasing: the largest item first, each into the fullest sequence with room. It needs at most 11/9 of the
minimum, and 6/9 of one more (Dósa 2007, for first fit; best fit is no worse there: Johnson 1973).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The items of each sequence, by number. Equal lists give equal results on every machine.

    Items keep their order within a sequence, and sequences have that of their first items, so that any range of them is
    a fair sample.
    """
    assert all(0 < size <= capacity for size in sizes), "no item is larger than a sequence"
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        place = bisect_left(rooms, sizes[item])
        if place == len(rooms):
            rows.append([])
            sequence, room = len(rows) - 1, capacity
        else:
            room = rooms[place]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[sequence].append(item)
        left = room - sizes[item]
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(sequence)
    return sorted(map(sorted, rows))
