"""Loss over FLOPs as an SVG: the runs, the law at each of their sizes, and the law's optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from superstep.observe.number_format import count_text
from superstep.scaling.budget import BestUse, best_of_flops
from superstep.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN, Hoffmann
from superstep.scaling.runs import table
from superstep.scaling.summary import Study

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 110, 24, 52
"""Margins of the plot, in the SVG's units."""
SMALL, LARGE, BEST = (63, 94, 171), (230, 140, 40), "#b3003c"
"""Colours of the smallest size, of the largest, and of the optimum."""
STEPS = 80
MOST_LEGENDS = 14
"""With more sizes, only some have their lines and names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotAxes:
    """Ranges of the axes: FLOPs by their logarithm to ten, and losses."""

    flops: tuple[float, float]
    losses: tuple[float, float]

    def place(self, log_flops: float, loss: float) -> tuple[float, float]:
        """A point's place in the SVG."""
        across = (log_flops - self.flops[0]) / (self.flops[1] - self.flops[0])
        down = (self.losses[1] - loss) / (self.losses[1] - self.losses[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)


def plot_svg(summary: Study, best: BestUse | None) -> str:
    """The whole picture."""
    points = table(summary.runs)
    frame = _frame(points.flops.tolist(), points.loss.tolist(), best)
    sizes = sorted({run.params for run in summary.runs})
    shown = sizes[:: -(-len(sizes) // MOST_LEGENDS)]
    law = summary.hoffmann.law if summary.hoffmann else None
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" fill="#333">',
        "<title>Loss of the runs over the FLOPs of their training, and the law that was fitted to them</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_axes(frame),
        *_legend(sizes, shown),
    ]
    for params, loss, flops in zip(points.params, points.loss, points.flops, strict=True):
        x, y = frame.place(math.log10(flops), loss)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_colour(sizes, params)}" fill-opacity="0.8"/>')
    if law is not None:
        parts += [_line(frame, _at_size(law, params), f'stroke="{_colour(sizes, params)}"') for params in shown]
        parts.append(_line(frame, _frontier(law), f'stroke="{BEST}" stroke-width="2" stroke-dasharray="6 4"'))
    if best is not None and best.loss is not None:
        x, y = frame.place(math.log10(best.flops), best.loss)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{BEST}"/>')
        parts.append(
            f'<text x="{x - 10:.1f}" y="{y + 18:.1f}" text-anchor="end" fill="{BEST}">{count_text(best.params)} on '
            f"{count_text(best.tokens)} tokens: {best.loss:.3f}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(flops: Sequence[float], losses: Sequence[float], best: BestUse | None) -> PlotAxes:
    at = [*flops, *([best.flops] if best else [])]
    heights = [*losses, *([best.loss] if best and best.loss is not None else [])]
    margin = 0.06 * (max(heights) - min(heights)) or 0.1
    return PlotAxes(
        flops=(math.log10(min(at)) - 0.1, math.log10(max(at)) + 0.1),
        losses=(max(0.0, min(heights) - 2 * margin), max(heights) + margin),
    )


def _at_size(law: Hoffmann, params: float) -> Callable[[float], float]:
    return lambda flops: law.loss(params, flops / (FLOPS_PER_PARAMETER_AND_TOKEN * params))


def _frontier(law: Hoffmann) -> Callable[[float], float]:
    return lambda flops: best_of_flops(law, flops).loss or 0.0


def _line(frame: PlotAxes, loss: Callable[[float], float], style: str) -> str:
    """The part of a curve within the frame."""
    logs = np.linspace(*frame.flops, STEPS).tolist()
    inside = [(log, y) for log in logs if frame.losses[0] <= (y := loss(10**log)) <= frame.losses[1]]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (frame.place(*point) for point in inside))
    return f'<polyline fill="none" {style} stroke-opacity="0.7" points="{path}"/>'


def _colour(sizes: Sequence[float], params: float) -> str:
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    part = (math.log(params) - low) / (high - low) if high > low else 0.0
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(SMALL, LARGE, strict=True))


def _legend(sizes: Sequence[float], shown: Sequence[float]) -> Iterator[str]:
    """Sizes and their colours."""
    x = WIDTH - RIGHT + 16
    for row, params in enumerate(shown):
        y = TOP + 10 + 20 * row
        yield f'<circle cx="{x}" cy="{y}" r="4" fill="{_colour(sizes, params)}"/>'
        yield f'<text x="{x + 12}" y="{y + 4}">{count_text(params)}</text>'
    y = TOP + 10 + 20 * len(shown)
    yield f'<line x1="{x - 6}" x2="{x + 8}" y1="{y}" y2="{y}" stroke="{BEST}" stroke-width="2" stroke-dasharray="6 4"/>'
    yield f'<text x="{x + 12}" y="{y + 4}">best size</text>'


def _axes(frame: PlotAxes) -> Iterator[str]:
    low = HEIGHT - BOTTOM
    for power in range(math.ceil(frame.flops[0]), math.floor(frame.flops[1]) + 1):
        x, _ = frame.place(power, frame.losses[0])
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{low}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{low + 18}" text-anchor="middle">1e{power}</text>'
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if (frame.losses[1] - frame.losses[0]) / s <= 8)
    for tick in range(math.ceil(frame.losses[0] / step), math.floor(frame.losses[1] / step) + 1):
        _, y = frame.place(frame.flops[0], tick * step)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * step:.2f}</text>'
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{low}" y2="{low}" stroke="#333"/>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">FLOPs of training</text>'
    yield (
        f'<text transform="translate(18 {(TOP + low) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        "loss, nats a token</text>"
    )
