"""Plot: predicted against published step times on logarithmic axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from superstep.hardware.units import Array

SIDE, MARGIN = 640, 56
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#ff7f0e")


def scatter(published_s: Array, predicted_s: Array, kinds: Sequence[str]) -> str:
    """A point for each row, the diagonal, and 20% to either side of it."""
    low = math.floor(math.log10(min(published_s.min(), predicted_s.min())))
    high = math.ceil(math.log10(max(published_s.max(), predicted_s.max())))

    def x(value: float) -> float:
        return MARGIN + (math.log10(value) - low) / (high - low) * SIDE

    def y(value: float) -> float:
        return MARGIN + SIDE - (math.log10(value) - low) / (high - low) * SIDE

    names = list(dict.fromkeys(kinds))
    width, height = SIDE + 2 * MARGIN + 190, SIDE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        at = 10.0**power
        parts += [
            f'<path d="M{x(at):.1f} {MARGIN}V{MARGIN + SIDE}M{MARGIN} {y(at):.1f}H{MARGIN + SIDE}" stroke="#ddd"/>',
            f'<text x="{x(at):.1f}" y="{MARGIN + SIDE + 18}" text-anchor="middle">{at:g}</text>',
            f'<text x="{MARGIN - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>',
        ]
    for factor, dash in ((1.0, ""), (1.2, ' stroke-dasharray="4 4"'), (1 / 1.2, ' stroke-dasharray="4 4"')):
        first, last = max(10.0**low, 10.0**low / factor), min(10.0**high, 10.0**high / factor)
        line = f"M{x(first):.1f} {y(first * factor):.1f}L{x(last):.1f} {y(last * factor):.1f}"
        parts.append(f'<path d="{line}" stroke="#555" fill="none"{dash}/>')
    for true, guess, kind in zip(published_s, predicted_s, kinds, strict=True):
        colour = COLOURS[names.index(kind) % len(COLOURS)]
        parts.append(f'<circle cx="{x(true):.1f}" cy="{y(guess):.1f}" r="2.6" fill="{colour}" fill-opacity="0.55"/>')
    for place, name in enumerate(names):
        top = MARGIN + 16 * place
        parts += [
            f'<circle cx="{SIDE + MARGIN + 18}" cy="{top}" r="4" fill="{COLOURS[place % len(COLOURS)]}"/>',
            f'<text x="{SIDE + MARGIN + 28}" y="{top + 4}">{name}</text>',
        ]
    parts += [
        f'<text x="{MARGIN + SIDE / 2}" y="{height - 14}" text-anchor="middle">published, seconds a step</text>',
        f'<text transform="translate(16 {MARGIN + SIDE / 2}) rotate(-90)" text-anchor="middle">predicted</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
