"""Curves over time as text: a row for each quantity, scaled to its own maximum.

rows of prompts  ▇▇▇▂  ▁        512
tokens drawn     ▁▃▅▇▇▇▇▅▃▁      32
                 └┬─────────
                  0         1.25 s
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from superstep.observe.drawing.memory import ASCII, LEVELS


@dataclass(frozen=True, slots=True)
class PlottedCurve:
    """One quantity. ``values``: one for each span of time. ``text``: writes their maximum, at the end of the row."""

    name: str
    values: Sequence[float]
    text: Callable[[float], str]


def draw_courses(
    spans: Sequence[tuple[float, float]],
    courses: Sequence[PlottedCurve],
    *,
    width: int,
    seconds: Callable[[float], str],
    has_signs: bool = True,
) -> str:
    """Rows of equal length; each column shows the maximum of its time.

    Args:
        spans: begin and end of each value, in order.
        width: columns.
        seconds: writes the time at the end of the axis.
        has_signs: whether the terminal shows block characters.
    """
    gutter = max(len(course.name) for course in courses) + 2
    columns = max(10, width - gutter - 10)
    end_s = max((end for _, end in spans), default=0.0) or 1.0
    signs = LEVELS if has_signs else ASCII
    lines = []
    for course in courses:
        most = max(course.values, default=0.0)
        heights = [0.0] * columns
        for (first_s, last_s), value in zip(spans, course.values, strict=True):
            first = min(int(first_s / end_s * columns), columns - 1)
            last = min(int(last_s / end_s * columns), columns - 1)
            for column in range(first, max(first, last) + 1):
                heights[column] = max(heights[column], value)
        # What is there at all is seen.
        drawn = "".join(
            signs[max(1, round(height / most * (len(signs) - 1))) if height > 0 else 0] for height in heights
        )
        lines.append(f"{course.name:{gutter}}{drawn}  {course.text(most)}")
    time = seconds(end_s)
    lines.append(f"{'':{gutter}}0{time:>{columns - 1}}")
    return "\n".join(lines)
