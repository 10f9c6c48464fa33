"""Lanes over time as text: what each lane did when, one row for each.

    sample  │v0▒▒▒▒▒▒▒     v1▒▒▒▒▒▒       ┊
    grade   │    ░░░░░░░       ░░░░░░     ┊
    train   │           1▓▓        2▓▓    ┊
            └─────────────────────────────┴────
             0                         34.2 s

Time without any work, as between two processes of a run, is left out: ┊.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Span = tuple[float, float]

PAUSE_S = 5.0
"""The shortest idle time that is left out."""

PAUSE_SHARE = 0.1
"""It is also longer than this share of the rest."""


@dataclass(frozen=True, slots=True)
class LaneItem:
    """Work of a lane, with a label at its begin where there is room."""

    span: Span
    label: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """A row. ``pieces``: by begin. ``ink``: the character of a piece, and the one for terminals without it."""

    name: str
    pieces: Sequence[LaneItem]
    ink: tuple[str, str]


def draw_lanes(lanes: Sequence[Lane], *, width: int, seconds: Callable[[float], str], has_signs: bool = True) -> str:
    """The rows of some lanes, on one scale.

    Args:
        lanes: from the top; an idle one has an empty row.
        width: columns.
        seconds: writes the time at the end of the axis.
        has_signs: whether the terminal shows block characters.
    """
    gutter = max(len(lane.name) for lane in lanes) + 2
    columns = max(10, width - gutter - 1)
    clock = Clock(piece.span for lane in lanes for piece in lane.pieces)
    bar, pause, corner, level, cross = "│┊└─┴" if has_signs else "|:+-+"

    def column(at_s: float) -> int:
        return min(int(clock.at(at_s) / (clock.seconds or 1.0) * columns), columns - 1)

    cuts = {column(cut_s) for cut_s in clock.cuts}
    lines = []
    for lane in lanes:
        row = [pause if at in cuts else " " for at in range(columns)]
        for piece in lane.pieces:
            first, last = column(piece.span[0]), column(piece.span[1])
            room = last - first + 1
            row[first : last + 1] = lane.ink[not has_signs] * room
            if len(piece.label) < room or (piece.label and room == len(piece.label) == 1):
                row[first : first + len(piece.label)] = piece.label
        lines.append(f"{lane.name:{gutter - 1}}{bar}{''.join(row)}".rstrip())
    axis = "".join(cross if at in cuts else level for at in range(columns))
    lines.append(f"{'':{gutter - 1}}{corner}{axis}")
    lines.append(f"{'':{gutter}}0{seconds(clock.seconds):>{columns - 1}}")
    return "\n".join(lines)


class Clock:
    """Seconds since the first span began, without the pauses between spans.

    Attributes:
        seconds: until the last span ended.
        cuts: where pauses begin, in the spans' seconds.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        busy = merge(spans)
        whole_s = length(busy)
        self._begins: list[float] = []
        self._shifts: list[float] = []
        shift_s = busy[0][0] if busy else 0.0
        self.cuts: list[float] = []
        for nth, (begin_s, _) in enumerate(busy):
            if nth and begin_s - busy[nth - 1][1] > max(PAUSE_S, PAUSE_SHARE * whole_s):
                shift_s += begin_s - busy[nth - 1][1]
                self.cuts.append(busy[nth - 1][1])
            self._begins.append(begin_s)
            self._shifts.append(shift_s)
        self.seconds = busy[-1][1] - shift_s if busy else 0.0

    def at(self, at_s: float) -> float:
        """The position of an instant within a span, or at its end."""
        nth = max(0, bisect_right(self._begins, at_s) - 1)
        return at_s - self._shifts[nth] if self._shifts else 0.0


def merge(spans: Iterable[Span]) -> list[Span]:
    """The time that some spans cover together, in order and without overlap."""
    joined: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end_s)
        else:
            joined.append((begin_s, end_s))
    return joined


def length(spans: Iterable[Span]) -> float:
    """Seconds that some spans cover together."""
    return sum(end_s - begin_s for begin_s, end_s in merge(spans))
