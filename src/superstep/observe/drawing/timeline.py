"""A step as text for a terminal: a row for each pipeline rank, time from left to right.

    rank 0 │0░░1░░2░░3░░·········0▓▓▓▓▓1▓▓▓▓▓2▓▓▓▓▓3▓▓▓▓▓
    rank 1 │···0░░1░░2░░3░░0▓▓▓▓▓1▓▓▓▓▓2▓▓▓▓▓3▓▓▓▓▓······
           └┬─────────┬─────────┬─────────┬─────────┬────
            0         10        20        30        40 ms

Simulated and recorded steps look alike. A column shows what filled most of its time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Lane, Program
from superstep.program.timeline import Timeline, TimelineEvent

GUTTER = 9
"""Columns left of the time: a name, a space, an edge."""


@dataclass(frozen=True, slots=True)
class Style:
    """How one kind of time is drawn.

    Attributes:
        meaning: its words in the legend.
        fill: the character without colour, or where ``is_line``.
        shades: 256-colour numbers: two for neighbouring microbatches, then two for the rank's next stage, ...
        is_line: ink on the terminal's background, without label.
    """

    meaning: str
    fill: str
    shades: tuple[int, ...]
    is_line: bool = False


FORWARD = Style("forward", "░", (25, 32, 30, 37, 61, 68, 24, 31))
RECOMPUTE = Style("recompute", "▒", (97, 140, 96, 139))
BACKWARD = Style("backward", "▓", (130, 172, 136, 178, 94, 137, 131, 173))
BACKWARD_INPUT = Style("backward, inputs", "▓", BACKWARD.shades)
BACKWARD_WEIGHT = Style("backward, weights", "▚", (64, 100, 65, 101, 70, 106, 58, 107))
UPDATE = Style("sums, step", "█", (243,))
BUBBLE = Style("bubble", "·", (240,), is_line=True)
EXPOSED = Style("waiting for communication", "!", (203,), is_line=True)
FETCH = Style("fetch", "━", (220,), is_line=True)
REDUCE = Style("reduce", "━", (176,), is_line=True)
SNAPSHOT = Style("snapshot", "━", (108,), is_line=True)
OFFLOAD = Style("offload", "━", (98,), is_line=True)
RELOAD = Style("reload", "━", (141,), is_line=True)
SEND_ACT = Style("activation sent", "▸", (75,), is_line=True)
SEND_GRAD = Style("gradient sent", "◂", (208,), is_line=True)


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one kind. Neighbours of one ``task`` share a label."""

    start_s: float
    end_s: float
    style: Style
    task: tuple[object, ...] = ()
    label: str = ""
    shade: int = 0


def draw_text(timeline: Timeline, width: int, colour: bool) -> str:
    """The step as lines: rows, time axis in ms, legend, and the time by use.

    Args:
        timeline: its ranks share one clock.
        width: the terminal's columns; at least 40 are used.
        colour: whether ANSI colours may be used; without them, shading tells forward from backward.
    """
    width = max(width, 40)
    canvas = _Canvas(timeline, columns=width - GUTTER, has_colour=colour)
    ranks = range(timeline.program.pp)
    lanes = [name for name in _LANES if any(_lane(timeline, rank, name) for rank in ranks)]
    lines: list[str] = []
    for rank in ranks:
        lines.append(canvas.row(f"rank {rank}", "│", _compute(timeline, rank)))
        lines += [canvas.row(name, "╎", _lane(timeline, rank, name), least=1.0) for name in lanes]
    lines += _axis(timeline, canvas.columns)
    lines += _wrap(canvas.legend(), "   ", width)
    lines += _wrap(_summary(timeline), " ", width)
    return "\n".join(lines) + "\n"


class _Canvas:
    """Columns of equal time, and the styles used so far, with the chunks that had their own hue."""

    def __init__(self, timeline: Timeline, columns: int, *, has_colour: bool) -> None:
        self.start_s = timeline.start_s
        self.column_s = timeline.step_s / columns or 1.0
        self.columns = columns
        self.has_colour = has_colour
        self.used: dict[Style, set[int]] = {}

    def row(self, name: str, edge: str, spans: Iterable[Span], *, least: float = 0.0) -> str:
        """One line: the name, and each column's fill. Spans are at least ``least`` columns wide."""
        cells: list[tuple[str, str]] = []
        labelled: set[tuple[object, ...]] = set()
        for task, members in groupby(self._fill(spans, least), key=lambda span: span.task if span else None):
            run = list(members)
            label = "" if task in labelled else self._label(run)
            if task and label:
                labelled.add(task)
            text = label.center(len(run)) if self.has_colour else label.ljust(len(run))
            cells += [self._paint(s, c) if s else ("", " ") for s, c in zip(run, text, strict=True)]
        inks = groupby(cells, key=lambda cell: cell[0])
        drawn = "".join(_ink(code, "".join(character for _, character in run)) for code, run in inks)
        return f"{name:>{GUTTER - 2}} {edge}{drawn}".rstrip()

    def _fill(self, spans: Iterable[Span], least: float) -> list[Span | None]:
        """For each column the span with most of its time; None where idle time has more."""
        shares: list[dict[Span, float]] = [{} for _ in range(self.columns)]
        first_of: dict[tuple[object, ...], Span] = {}
        for span in spans:
            start = (span.start_s - self.start_s) / self.column_s
            end = max(start + least, (span.end_s - self.start_s) / self.column_s)
            # The units of a stage are one thing to look at.
            kind = first_of.setdefault((span.style, *span.task), span)
            for column in range(int(start), min(self.columns, math.ceil(end))):
                share = min(end, column + 1) - max(start, column)
                shares[column][kind] = shares[column].get(kind, 0.0) + share
        return [_most(share) for share in shares]

    def _label(self, run: list[Span | None]) -> str:
        """The label over neighbouring columns of one task."""
        if run[0] is None:
            return ""
        # A backward pass without colour is known by its shading, so that goes before the label.
        room = len(run) - (not self.has_colour and run[0].style is not FORWARD)
        return run[0].label if len(run[0].label) <= room else ""

    def _paint(self, span: Span, character: str) -> tuple[str, str]:
        style = span.style
        shade = style.shades[span.shade % len(style.shades)]
        self.used.setdefault(style, set()).add(span.shade // 2)
        if not self.has_colour:
            return "", style.fill if character == " " else character
        if style.is_line:
            return f"38;5;{shade}", style.fill
        return f"48;5;{shade};38;5;231", character

    def legend(self) -> list[str]:
        return [self._sample(style, sorted(self.used[style])) for style in _STYLES if style in self.used]

    def _sample(self, style: Style, chunks: list[int]) -> str:
        has_hues = self.has_colour and len(chunks) > 1
        inks = [self._paint(Span(0.0, 0.0, style, shade=2 * c), " ") for c in (chunks if has_hues else [0])]
        width = 1 if has_hues else 2
        words = f"{style.meaning}, a hue for each stage" if has_hues else style.meaning
        return "".join(_ink(code, ink * width) for code, ink in inks) + f" {words}"


_STYLES = (
    FORWARD,
    RECOMPUTE,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    UPDATE,
    BUBBLE,
    EXPOSED,
    FETCH,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
)
# What is computed, and the task it belongs to: what is computed again has its label together with its backward.
_COMPUTED: dict[type[Instruction], tuple[Style, str]] = {
    ins.Forward: (FORWARD, "forward"),
    ins.Recompute: (RECOMPUTE, "backward"),
    ins.Backward: (BACKWARD, "backward"),
    ins.BackwardInput: (BACKWARD_INPUT, "backward"),
    ins.BackwardWeight: (BACKWARD_WEIGHT, "weights"),
}
_LANES: dict[str, dict[Lane, Style]] = {
    "fetch": {"fetch": FETCH},
    "reduce": {"reduce": REDUCE},
    "send": {"act": SEND_ACT, "grad": SEND_GRAD},
    "snapshot": {"snapshot": SNAPSHOT},
    "out": {"out": OFFLOAD},
    "in": {"in": RELOAD},
}


def _most(share: dict[Span, float]) -> Span | None:
    best = max(share, key=lambda span: share[span], default=None)
    return best if best and share[best] >= 1 - sum(share.values()) else None


def _compute(timeline: Timeline, rank: int) -> Iterator[Span]:
    """A rank's compute and waits."""
    for event in timeline.of(rank):
        if event.lane == "compute" and not isinstance(event.instruction, ins.Free):
            yield _compute_span(timeline.program, event)
    for wait in timeline.waits(rank):
        style = EXPOSED if wait.lane else BUBBLE
        yield Span(wait.start_s, wait.end_s, style, ("wait", style.meaning))


def _compute_span(program: Program, event: TimelineEvent) -> Span:
    match event.instruction:
        case (
            ins.Forward(unit, m)
            | ins.Recompute(unit, m)
            | ins.Backward(unit, m)
            | ins.BackwardInput(unit, m)
            | ins.BackwardWeight(unit, m)
        ):
            stage = program.stage_of(unit)
            chunk = program.stages_of(event.rank).index(stage)
            style, task = _COMPUTED[type(event.instruction)]
            shade = 2 * chunk + m % 2
            return Span(event.start_s, event.end_s, style, (task, stage, m), str(m), shade)
        case ins.Step():
            return Span(event.start_s, event.end_s, UPDATE, ("step",), "step")
        case _:
            return Span(event.start_s, event.end_s, UPDATE, ("sums",))


def _lane(timeline: Timeline, rank: int, name: str) -> list[Span]:
    """A lane of a rank; transfers are drawn at their sender."""
    styles = _LANES[name]
    return [
        Span(e.start_s, e.end_s, styles[e.lane], (e.lane,))
        for e in timeline.of(rank)
        if e.lane in styles and e.end_s > e.start_s and not isinstance(e.instruction, ins.Recv)
    ]


def _axis(timeline: Timeline, columns: int) -> list[str]:
    """A ruler, and the milliseconds under its ticks."""
    span_ms = timeline.step_s * 1e3
    ruler, numbers = ["─"] * columns, [" "] * columns
    if span_ms > 0:
        tick_ms = _tick(span_ms * 9 / columns)
        for k in range(int(span_ms / tick_ms) + 1):
            column = min(columns - 1, round(k * tick_ms / span_ms * columns))
            ruler[column] = "┬"
            text = f"{k * tick_ms:g}"
            if column + len(text) <= columns - 3:
                numbers[column : column + len(text)] = text
        numbers[-2:] = "ms"
    return [" " * (GUTTER - 1) + "└" + "".join(ruler), " " * GUTTER + "".join(numbers)]


def _tick(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least)


def _summary(timeline: Timeline) -> list[str]:
    """The step in parts that add up, as means over the ranks."""
    spent = timeline.measure_uses()

    def mean_ms(seconds: Iterable[float]) -> str:
        return f"{sum(seconds) / len(spent) * 1e3:.4g}"

    words = [
        f"step {timeline.step_s * 1e3:.4g} ms =",
        f"compute {mean_ms(s.busy_s for s in spent)}",
        f"+ bubble {mean_ms(s.bubble_s for s in spent)} ({timeline.bubble():.1%} of compute)",
    ]
    for name, styles in _LANES.items():
        exposed = [sum(s.exposed_s[lane] for lane in styles) for s in spent]
        words += [f"+ exposed {name} {mean_ms(exposed)}"] if any(exposed) else []
    return words


def _wrap(words: Iterable[str], gap: str, width: int) -> Iterator[str]:
    """Lines of words, indented to the edge; colour codes take no width."""
    line, used = "", 0
    for word in words:
        columns = len(re.sub(r"\x1b\[[\d;]*m", "", word))
        if line and GUTTER + used + len(gap) + columns > width:
            yield " " * GUTTER + line
            line, used = "", 0
        line, used = (line + gap + word, used + len(gap) + columns) if line else (word, columns)
    yield " " * GUTTER + line


def _ink(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code else text
