"""The routers' reports of a run as text: experts below each other, training from left to right.

    layer 0
    expert 0 │▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    expert 1 │░░░░░░░░▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    expert 2 │··░░░░▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
             └┬───────────┬───────────┬─────────
              1           101         201   step

A column adds up reports. Its shade is the expert's load over the even load.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from superstep.observe.events import RouterStats
from superstep.observe.router_balance import busiest, entropy, share_dropped

GUTTER = 12
"""Columns left of the time: ``expert 127 ``, an edge."""

LEAST = 40
"""The least columns."""

TICK = 12
"""Columns between step numbers."""

BOUNDS = (0.5, 0.8, 1.25, 2.0)
"""Loads over the even load, where the shade changes: ratios and their inverses."""

MEANINGS = ("under 1/2 of the even load", "under 4/5", "about even", "over 5/4", "over 2")


@dataclass(frozen=True, slots=True)
class PictureInk:
    """The characters and colours of a picture.

    Attributes:
        fills: a character for each shade, the lightest load first.
        edge: left of the columns.
        axis: corner, tick, line.
        colours: 256-colour numbers of the background by shade; empty where characters suffice.
    """

    fills: str
    edge: str
    axis: tuple[str, str, str]
    colours: tuple[int, ...] = ()


SHADES = PictureInk("·░▒▓█", "│", ("└", "┬", "─"))
ASCII = PictureInk(".-=*#", "|", ("+", "+", "-"))
COLOURS = PictureInk("     ", "│", ("└", "┬", "─"), colours=(25, 67, 240, 137, 166))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """The routers over steps ``first`` to ``last``; counts by layer and expert."""

    first: int
    last: int
    chosen: Sequence[Sequence[int]]
    dropped: Sequence[Sequence[int]]


def reports(lines: Iterable[Mapping[str, Any]]) -> list[RouterReport]:
    return [
        RouterReport(
            first=line["step"] - line["steps"] + 1, last=line["step"], chosen=line["chosen"], dropped=line["dropped"]
        )
        for line in lines
        if line.get("event") == RouterStats.name
    ]


def draw_routers(reports: Sequence[RouterReport], layers: Iterable[int], *, width: int, ink: PictureInk) -> str:
    """The picture of some layers, and a table of the first report beside the last.

    Args:
        reports: at least one, in order.
        layers: those that the model lacks are ignored.
        width: the terminal's columns; at least ``LEAST`` are used.
    """
    width = max(width, LEAST)
    columns = _columns(reports, width - GUTTER)
    layers = list(layers)
    lines: list[str] = []
    for layer in layers:
        loads = [_loads([report.chosen[layer] for report in column]) for column in columns]
        lines += [f"layer {layer}", *_rows(loads, ink), *_axis(reports, width - GUTTER, ink), ""]
    lines += [*_legend(width, ink), "", *_table(reports, layers)]
    return "\n".join(lines) + "\n"


def _columns(reports: Sequence[RouterReport], count: int) -> list[Sequence[RouterReport]]:
    """The reports of each column: several, or one over several columns."""
    edges = [len(reports) * place // count for place in range(count + 1)]
    return [reports[low : max(high, low + 1)] for low, high in pairwise(edges)]


def _loads(chosen: Sequence[Sequence[int]]) -> list[float]:
    """Each expert's load over the even load."""
    total = [sum(counts) for counts in zip(*chosen, strict=True)]
    even = sum(total) / len(total) or 1.0
    return [count / even for count in total]


def _rows(loads: Sequence[Sequence[float]], ink: PictureInk) -> Iterator[str]:
    for expert, course in enumerate(zip(*loads, strict=True)):
        shades = groupby(bisect_right(BOUNDS, load) for load in course)
        cells = "".join(_fill(shade, len(list(run)), ink) for shade, run in shades)
        yield f"{f'expert {expert}':>{GUTTER - 2}} {ink.edge}{cells}"


def _fill(shade: int, columns: int, ink: PictureInk) -> str:
    fill = ink.fills[shade] * columns
    return f"\x1b[48;5;{ink.colours[shade]}m{fill}\x1b[0m" if ink.colours else fill


def _axis(reports: Sequence[RouterReport], columns: int, ink: PictureInk) -> Iterator[str]:
    corner, tick, line = ink.axis
    marks = "".join(line if place % TICK else tick for place in range(columns))
    # The last number has room for itself and for the word behind it.
    places = range(0, columns - TICK + 1, TICK)
    numbers = "".join(f"{_step_at(reports, place / columns):<{TICK}}" for place in places)
    yield " " * (GUTTER - 1) + corner + marks
    yield " " * GUTTER + numbers.rstrip() + " step"


def _step_at(reports: Sequence[RouterReport], share: float) -> int:
    """The step after a share of the reports."""
    at, part = divmod(share * len(reports), 1)
    report = reports[int(at)]
    return report.first + int(part * (report.last - report.first + 1))


def _legend(width: int, ink: PictureInk) -> Iterator[str]:
    """The shades, as many on a line as fit."""
    line, used = "", 0
    for shade, meaning in enumerate(MEANINGS):
        columns = len("   xx ") + len(meaning)
        if used + columns > width:
            yield line
            line, used = "", 0
        line, used = f"{line}   {_fill(shade, 2, ink)} {meaning}", used + columns
    yield line


def _table(reports: Sequence[RouterReport], layers: Iterable[int]) -> Iterator[str]:
    """The first report beside the last; entropy is in bits."""
    first, last = reports[0], reports[-1]
    bits = math.log2(len(first.chosen[0]))
    yield f"steps {first.first} to {first.last}, then {last.first} to {last.last}:"
    yield f"{'layer':>7}{'busiest / mean':>18}{f'entropy of {bits:.3g}':>18}{'dropped':>18}"
    for layer in layers:
        measures = [
            (
                busiest(r.chosen[layer]),
                entropy(r.chosen[layer]),
                share_dropped(r.chosen[layer], r.dropped[layer]),
            )
            for r in (first, last)
        ]
        cells = (f"{a:{form}} {b:{form}}" for a, b, form in zip(*measures, ("8.2f", "8.3f", "8.1%"), strict=True))
        yield f"{layer:>7}" + "".join(f"{cell:>18}" for cell in cells)
