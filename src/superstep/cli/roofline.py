"""The roofline (Williams 2009): how many operations each byte of memory is worth, and how fast they then can be.

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

from superstep.cli.figures import count_text, seconds_text
from superstep.cost.machine import Prices

WIDTH, HEIGHT = 720, 420
MARGIN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One unit: its operations, the bytes that they move, and what they are predicted to take."""

    name: str
    flops: int
    bytes: int
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """As predicted."""
        return self.flops / self.seconds if self.seconds else 0.0

    def roof(self, machine: Prices) -> float:
        """The most that the machine can do at this intensity, FLOP/s."""
        return min(machine.gemm_flops_per_s, self.intensity * machine.memory_bytes_per_s)


def draw_text(machine: Prices, points: Sequence[Point]) -> list[str]:
    """A line for each unit: where it stands, what limits it, and how near it comes to its roof."""
    ridge = machine.gemm_flops_per_s / machine.memory_bytes_per_s
    lines = [
        f"roofline: {count_text(machine.gemm_flops_per_s)}FLOP/s from {ridge:.3g} FLOPs a byte on, "
        f"{machine.memory_bytes_per_s / 1e9:.3g} GB/s below"
    ]
    for point in points:
        limit = "memory" if point.intensity < ridge else "products"
        share = point.flops_per_s / point.roof(machine) if point.roof(machine) else 0.0
        bar = "#" * round(20 * min(share, 1.0))
        lines.append(
            f"  {point.name:16}{point.intensity:8.3g} FLOPs/byte  {limit:9}{seconds_text(point.seconds):>9}  "
            f"{share:5.0%} of its roof  {bar}"
        )
    return lines


def draw_svg(machine: Prices, points: Sequence[Point]) -> str:
    """The picture, both axes logarithmic."""
    shown = [point for point in points if point.intensity > 0 and point.flops_per_s > 0]
    ridge = machine.gemm_flops_per_s / machine.memory_bytes_per_s
    low = min([ridge / 10, *(point.intensity / 2 for point in shown)])
    high = max([ridge * 10, *(point.intensity * 2 for point in shown)])
    top = machine.gemm_flops_per_s * 2
    bottom = min([top / 1e3, *(point.flops_per_s / 2 for point in shown)])

    def x(intensity: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * math.log(intensity / low) / math.log(high / low)

    def y(rate: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * math.log(rate / bottom) / math.log(top / bottom)

    start = max(low, bottom / machine.memory_bytes_per_s)
    roof = [(start, start * machine.memory_bytes_per_s), (ridge, machine.gemm_flops_per_s)]
    roof.append((high, machine.gemm_flops_per_s))
    path = " ".join(f"{x(i):.1f},{y(rate):.1f}" for i, rate in roof)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="2"/>',
        f'<text x="{WIDTH - MARGIN}" y="{y(machine.gemm_flops_per_s) - 8:.1f}" text-anchor="end">'
        f"{count_text(machine.gemm_flops_per_s)}FLOP/s</text>",
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">FLOPs per byte</text>',
    ]
    for point in shown:
        at = f'cx="{x(point.intensity):.1f}" cy="{y(point.flops_per_s):.1f}"'
        label = f'x="{x(point.intensity) + 8:.1f}" y="{y(point.flops_per_s) + 4:.1f}"'
        parts += [f'<circle {at} r="4" fill="#0a6"/>', f"<text {label}>{point.name}</text>"]
    return "\n".join([*parts, "</svg>", ""])
