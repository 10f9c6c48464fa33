"""Plot: training error over epochs of ReLU and of tanh, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 380, 56
STYLES = {"relu": ("ReLU", "#1f77b4", ""), "tanh": ("tanh", "#d62728", ' stroke-dasharray="5 4"')}


def draw_errors(runs: Sequence[Mapping[str, Any]], wanted: float) -> str:
    """A line for each seed and side, from the first epoch on, and the error that ends a run."""
    longest = max(len(errors) for run in runs for errors in run["errors"].values())

    def x(epoch: float) -> float:
        return MARGIN + epoch / longest * (WIDTH - 2 * MARGIN)

    def y(error: float) -> float:
        return HEIGHT - MARGIN - error / 0.8 * (HEIGHT - 2 * MARGIN)

    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" fill="#333">',
        "<title>Training error over epochs: a four-layer network with ReLU and with tanh</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for error in (0.0, 0.25, 0.5, 0.75):
        parts += [
            f'<path d="M{MARGIN} {y(error):.1f}H{right}" stroke="{"#555" if error == wanted else "#ddd"}"/>',
            f'<text x="{MARGIN - 8}" y="{y(error) + 4:.1f}" text-anchor="end">{error:.0%}</text>',
        ]
    for epoch in range(0, longest + 1, max(1, longest // 8)):
        parts.append(f'<text x="{x(epoch):.1f}" y="{bottom + 18}" text-anchor="middle">{epoch}</text>')
    for run in runs:
        for name, errors in run["errors"].items():
            _, colour, dash = STYLES[name]
            points = " ".join(f"{x(epoch):.1f},{y(min(error, 0.8)):.1f}" for epoch, error in enumerate(errors, 1))
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dash} points="{points}"/>')
    for place, (name, colour, dash) in enumerate(STYLES.values()):
        top = MARGIN + 18 * place
        parts += [
            f'<path d="M{right - 90} {top}h28" stroke="{colour}" stroke-width="1.8"{dash}/>',
            f'<text x="{right - 54}" y="{top + 4}">{name}</text>',
        ]
    parts += [
        f'<text x="{(MARGIN + right) / 2}" y="{HEIGHT - 14}" text-anchor="middle">epochs</text>',
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">training error</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
