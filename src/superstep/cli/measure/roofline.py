"""The roofline (Williams 2009): the rate of operations that a number of operations per byte of memory allows.

FLOP/s
  peak           ____________
                /    b   h
               /  a
              / e              bytes/s x intensity below the ridge, the peak above it
             +--------------- FLOPs per byte
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from superstep.observe.number_format import rate_text, seconds_text

WIDTH, HEIGHT = 720, 420
MARGIN = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A machine's limits: operations per second, and bytes of memory per second."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on products are the limit, not memory."""
        return self.flops_per_s / self.bytes_per_s

    def over(self, intensity: float) -> float:
        """The limit at a number of FLOPs per byte, in FLOP/s."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One unit: its operations, its bytes, and its predicted seconds."""

    name: str
    flops: int
    bytes: int
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """The predicted rate."""
        return self.flops / self.seconds if self.seconds else 0.0


def draw_text(roof: Roofline, points: Sequence[RooflinePoint]) -> list[str]:
    """A line for each unit: its place, its limit, and how near it comes to its roof."""
    lines = [
        f"roofline: {rate_text(roof.flops_per_s)} from {roof.ridge:.3g} FLOPs a byte on, "
        f"{roof.bytes_per_s / 1e9:.3g} GB/s below"
    ]
    for point in points:
        limit = "memory" if point.intensity < roof.ridge else "products"
        share = point.flops_per_s / roof.over(point.intensity) if point.intensity else 0.0
        bar = "#" * round(20 * min(share, 1.0))
        lines.append(
            f"  {point.name:16}{point.intensity:8.3g} FLOPs/byte  {limit:9}{seconds_text(point.seconds):>9}  "
            f"{share:5.0%} of its roof  {bar}"
        )
    return lines


def draw_svg(roof: Roofline, points: Sequence[RooflinePoint]) -> str:
    """The picture, with logarithmic axes."""
    shown = [point for point in points if point.intensity > 0 and point.flops_per_s > 0]
    low = min([roof.ridge / 10, *(point.intensity / 2 for point in shown)])
    high = max([roof.ridge * 10, *(point.intensity * 2 for point in shown)])
    top = roof.flops_per_s * 2
    bottom = min([top / 1e3, *(point.flops_per_s / 2 for point in shown)])

    def x(intensity: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * math.log(intensity / low) / math.log(high / low)

    def y(rate: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * math.log(rate / bottom) / math.log(top / bottom)

    start = max(low, bottom / roof.bytes_per_s)
    line = [(start, roof.over(start)), (roof.ridge, roof.flops_per_s), (high, roof.flops_per_s)]
    path = " ".join(f"{x(i):.1f},{y(rate):.1f}" for i, rate in line)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="2"/>',
        f'<text x="{WIDTH - MARGIN}" y="{y(roof.flops_per_s) - 8:.1f}" text-anchor="end">'
        f"{rate_text(roof.flops_per_s)}</text>",
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">FLOPs per byte</text>',
    ]
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        parts += [
            f'<path d="M{x(10.0**power):.1f} {MARGIN}V{HEIGHT - MARGIN}" stroke="#ddd"/>',
            f'<text x="{x(10.0**power):.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{10.0**power:g}</text>',
        ]
    for power in range(math.ceil(math.log10(bottom)), math.floor(math.log10(top)) + 1):
        parts += [
            f'<path d="M{MARGIN} {y(10.0**power):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>',
            f'<text x="{MARGIN - 4}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{rate_text(10.0**power)}</text>',
        ]
    below = 0.0
    for point in sorted(shown, key=lambda each: -each.flops_per_s):
        left, height = x(point.intensity), y(point.flops_per_s)
        # Names of nearby points are stacked.
        below = max(height + 4, below + 13)
        parts += [
            f'<circle cx="{left:.1f}" cy="{height:.1f}" r="4" fill="#0a6"/>',
            f'<text x="{left + 8:.1f}" y="{below:.1f}">{point.name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
