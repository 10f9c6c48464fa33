"""A step as SVG, for papers: the timeline's rows, its ruler, the bubble with its share, and a legend.

Colours are those of Okabe and Ito (2008), for any colour vision. Shapes thinner than a third of a point are drawn
together, so that a step of many microbatches stays a small file.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction
from superstep.program.timeline import Timeline, TimelineEvent, Wait

WIDTH = 720
LEFT, RIGHT, TOP = 58, 8, 8
THIN = 0.34


@dataclass(frozen=True, slots=True)
class InstructionInk:
    """How a kind of instruction is drawn: two fills for neighbouring microbatches, and the number's colour."""

    meaning: str
    fills: tuple[str, str]
    number: str = ""


FORWARD = InstructionInk("forward", ("#0072b2", "#3391cb"), "#ffffff")
RECOMPUTE = InstructionInk("computed again", ("#7fc4ee", "#a2d5f4"), "#10161b")
BACKWARD = InstructionInk("backward", ("#e69f00", "#f2bb45"), "#10161b")
INPUT = InstructionInk("backward, inputs", BACKWARD.fills, "#10161b")
WEIGHT = InstructionInk("backward, weights", ("#009e73", "#3fb896"), "#ffffff")
UPDATE = InstructionInk("step", ("#2f3942", "#2f3942"), "#ffffff")
SUMS = InstructionInk("sums", ("#6b737c", "#6b737c"))
FETCH = InstructionInk("fetch", ("#c9b800", "#c9b800"))
REDUCE = InstructionInk("reduce", ("#cc79a7", "#cc79a7"))
ACT = InstructionInk("activation sent", ("#56b4e9", "#56b4e9"))
GRAD = InstructionInk("gradient sent", ("#d55e00", "#d55e00"))
SNAPSHOT = InstructionInk("snapshot", ("#8c8c8c", "#8c8c8c"))
OFFLOAD = InstructionInk("offload", ("#7b5ea7", "#7b5ea7"))
RELOAD = InstructionInk("reload", ("#b39ddb", "#b39ddb"))
_INKS: dict[type[Instruction], InstructionInk] = {
    ins.Forward: FORWARD,
    ins.Recompute: RECOMPUTE,
    ins.Backward: BACKWARD,
    ins.BackwardInput: INPUT,
    ins.BackwardWeight: WEIGHT,
    ins.Step: UPDATE,
    ins.Fetch: FETCH,
    ins.Reduce: REDUCE,
    ins.ReduceRows: REDUCE,
    ins.ReduceReplicas: REDUCE,
    ins.Snapshot: SNAPSHOT,
    ins.Offload: OFFLOAD,
    ins.Reload: RELOAD,
}
_LANES = ("fetch", "reduce", "act", "grad", "snapshot", "out", "in")


def draw_svg(timelines: Iterable[tuple[str, Timeline]]) -> str:
    """Steps below each other on one scale, each with its caption."""
    steps = list(timelines)
    longest_s = max(timeline.step_s for _, timeline in steps) or 1.0
    body: list[str] = []
    used: list[InstructionInk] = []
    y = float(TOP)
    for caption, timeline in steps:
        drawing = _Drawing(timeline, (WIDTH - LEFT - RIGHT) / longest_s, used)
        body.append(_text(LEFT, y + 8, caption, size=10, weight="600"))
        body += drawing.rows(y + 14)
        y += 14 + drawing.height + 8
    body += _ruler(y, longest_s)
    lines, height = _legend(y + 22, used)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" role="img">\n'
        f"<title>{html.escape('; '.join(caption for caption, _ in steps))}</title>\n"
        '<defs><pattern id="bubble" width="5" height="5" patternUnits="userSpaceOnUse">'
        '<rect width="5" height="5" fill="#eceff2"/>'
        '<path d="M-1 6 L6 -1" stroke="#b9c1ca" stroke-width="0.8"/></pattern>'
        '<pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse"><rect width="5" height="5" '
        'fill="#f6d3cf"/><path d="M-1 6 L6 -1" stroke="#d55e00" stroke-width="0.8"/></pattern></defs>\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n' + "\n".join([*body, *lines]) + "\n</svg>\n"
    )


class _Drawing:
    """One step; ``used`` collects its inks."""

    def __init__(self, timeline: Timeline, scale: float, used: list[InstructionInk]) -> None:
        self.timeline = timeline
        self.scale = scale
        self.start_s = timeline.start_s
        self.used = used
        self.lanes = [lane for lane in _LANES if any(e.lane == lane and _is_drawn(e) for e in timeline.events)]
        few = timeline.program.pp <= 8
        self.row, self.beside, self.gap = (16.0, 4.0, 5.0) if few else (9.0, 2.0, 2.0)
        self.height = timeline.program.pp * (self.row + len(self.lanes) * (self.beside + 1) + self.gap)

    def x(self, clock_s: float) -> float:
        return LEFT + (clock_s - self.start_s) * self.scale

    def _waits(self, waits: Sequence[Wait], y: float) -> Iterator[str]:
        thin = []
        for wait in waits:
            fill, x, end = "url(#wait)" if wait.lane else "url(#bubble)", self.x(wait.start_s), self.x(wait.end_s)
            if end - x < THIN:
                thin.append((fill, x, end))
            else:
                yield _box(x, y, end - x, self.row, fill)
        yield from _together(thin, y, self.row)

    def rows(self, y: float) -> Iterator[str]:
        """Every rank: its compute and waits, and a thin row for each lane."""
        for rank, waits in enumerate(self.timeline.find_waits()):
            yield _text(LEFT - 5, y + self.row / 2 + 3, f"rank {rank}", size=9, anchor="end")
            yield from self._waits(waits, y)
            events = [e for e in self.timeline.of(rank) if _is_drawn(e)]
            yield from self._boxes([e for e in events if e.lane == "compute"], y, self.row)
            y += self.row + 1
            for lane in self.lanes:
                yield _box(LEFT, y, self.timeline.step_s * self.scale, self.beside, "#f4f6f7")
                yield from self._boxes([e for e in events if e.lane == lane], y, self.beside)
                y += self.beside + 1
            y += self.gap - 1

    def _boxes(self, events: list[TimelineEvent], y: float, height: float) -> Iterator[str]:
        thin: list[tuple[str, float, float]] = []
        numbered: tuple[object, ...] = ()
        for e in sorted(events, key=lambda e: e.start_s):
            ink = _ink(e)
            if ink not in self.used:
                self.used.append(ink)
            m = getattr(e.instruction, "microbatch", 0)
            fill, x, end = ink.fills[m % 2], self.x(e.start_s), self.x(e.end_s)
            if e.lane != "compute":
                end = max(end, x + 0.8)
            if end - x < THIN:
                thin.append((fill, x, end))
                continue
            yield from _together(thin, y, height)
            thin = []
            yield _box(x, y, end - x, height, fill)
            task = (ink, m, self._stage(e))
            word = "step" if isinstance(e.instruction, ins.Step) else str(m)
            if ink.number and height > 8 and task != numbered and end - x > 1 + 4.5 * len(word):
                yield _text((x + end) / 2, y + height / 2 + 3, word, size=8, anchor="middle", fill=ink.number)
                numbered = task
        yield from _together(thin, y, height)

    def _stage(self, e: TimelineEvent) -> int:
        unit = getattr(e.instruction, "unit", None)
        return -1 if unit is None else self.timeline.program.stage_of(unit)


def caption_of(name: str, timeline: Timeline, *, closed: float | None, formula: str) -> str:
    """A step's caption: its length, and the bubble beside its closed form."""
    text = f"{name}: {timeline.step_s * 1e3:.4g} ms, bubble {timeline.bubble():.1%} of compute"
    return text if closed is None else f"{text} (closed form {formula} = {closed:.1%})"


def _is_drawn(e: TimelineEvent) -> bool:
    return not isinstance(e.instruction, ins.Recv | ins.Free) and (e.lane == "compute" or e.end_s > e.start_s)


def _ink(e: TimelineEvent) -> InstructionInk:
    if isinstance(e.instruction, ins.Send):
        return ACT if e.instruction.wire == "act" else GRAD
    return _INKS.get(type(e.instruction), SUMS)


def _together(thin: list[tuple[str, float, float]], y: float, height: float) -> Iterator[str]:
    """Shapes too thin to see one by one: each third of a point has its most frequent fill."""
    shares: dict[int, dict[str, float]] = {}
    for fill, x, end in thin:
        share = shares.setdefault(int(x / THIN), {})
        share[fill] = share.get(fill, 0.0) + end - x
    run: tuple[str, int, int] | None = None
    for column, share in sorted(shares.items()):
        fill = max(share, key=lambda one: share[one])
        if run and run[0] == fill and column == run[2]:
            run = (fill, run[1], column + 1)
            continue
        if run:
            yield _box(run[1] * THIN, y, (run[2] - run[1]) * THIN, height, run[0])
        run = (fill, column, column + 1)
    if run:
        yield _box(run[1] * THIN, y, (run[2] - run[1]) * THIN, height, run[0])


def _ruler(y: float, longest_s: float) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten."""
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    least_s = 60 / scale
    power = 10.0 ** math.floor(math.log10(least_s))
    tick_s = next(power * step for step in (1, 2, 5, 10) if power * step >= least_s)
    yield f'<path d="M{LEFT} {y - 4:.1f}H{WIDTH - RIGHT}" stroke="#5b6470" stroke-width="0.7"/>'
    for k in range(int(longest_s / tick_s + 1e-9) + 1):
        x = LEFT + k * tick_s * scale
        yield f'<path d="M{x:.2f} {y - 4:.1f}v4" stroke="#5b6470" stroke-width="0.7"/>'
        word = f"{k * tick_s * 1e3:.4g}"
        yield _text(x, y + 9, f"{word} ms" if k == 0 else word, size=8, anchor="start" if k == 0 else "middle")


def _legend(y: float, used: list[InstructionInk]) -> tuple[list[str], float]:
    """The legend's lines, and the drawing's height."""
    drawn, x = [], float(LEFT)
    meant = [(ink.meaning, ink.fills[0]) for ink in used]
    for meaning, fill in [*meant, ("bubble", "url(#bubble)"), ("waits for communication", "url(#wait)")]:
        wide = 14 + 4.9 * len(meaning) + 10
        if x + wide > WIDTH - RIGHT:
            x, y = float(LEFT), y + 14
        drawn += [_box(x, y - 7, 10, 8, fill), _text(x + 14, y, meaning, size=9)]
        x += wide
    return drawn, y + 10


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:g}" fill="{fill}"/>'


def _text(
    x: float, y: float, text: str, *, size: int, anchor: str = "start", weight: str = "400", fill: str = "#1c2024"
) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}">{html.escape(text)}</text>'
    )
