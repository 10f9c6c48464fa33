"""The memory of a step over time as text: a row for each rank and category.

    rank 0  kept activations  ▁▂▃▄▅▆▇█▇▆▅▄▃▂▁   412 MiB

The rows of a category share their scale, so that ranks compare; a category without bytes has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from superstep.program.peak_memory import Peak
from superstep.program.timeline import Timeline

LEVELS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#%"

CATEGORIES: tuple[tuple[str, Callable[[Peak], int]], ...] = (
    ("gathered parameters", lambda level: level.params_bytes),
    ("whole gradients", lambda level: level.gradient_bytes),
    ("kept activations", lambda level: level.kept_bytes),
    ("between units", lambda level: level.boundary_bytes),
    ("workspace", lambda level: level.workspace_bytes),
)
GUTTER = 32


def draw_memory(
    timeline: Timeline,
    courses: Sequence[Sequence[Peak]],
    *,
    width: int,
    text: Callable[[int], str],
    has_signs: bool = True,
) -> str:
    """Each rank's transient bytes over time; ``text`` writes a row's maximum at its end."""
    columns = max(width - GUTTER - 12, 10)
    signs = LEVELS if has_signs else ASCII
    lines = []
    for name, part in CATEGORIES:
        most = max((part(level) for levels in courses for level in levels), default=0)
        if not most:
            continue
        for rank, levels in enumerate(courses):
            heights = _heights(timeline, rank, [part(level) for level in levels], columns)
            drawn = "".join(signs[round(height / most * (len(signs) - 1))] for height in heights)
            lines.append(f"{f'rank {rank}  {name}':{GUTTER}}{drawn}  {text(max(map(part, levels), default=0))}")
    return "\n".join(lines)


def _heights(timeline: Timeline, rank: int, sizes: Sequence[int], columns: int) -> list[int]:
    """The maximum in each column's time."""
    heights = [0] * columns
    scale = columns / timeline.step_s if timeline.step_s > 0 else 0.0
    events = sorted((e for e in timeline.events if e.rank == rank), key=lambda event: event.index)
    for event, after in zip(events, [*events[1:], None], strict=True):
        first = min(int(event.start_s * scale), columns - 1)
        end_s = timeline.step_s if after is None else max(after.start_s, event.start_s)
        last = min(int(end_s * scale), columns - 1)
        for column in range(first, max(first, last) + 1):
            heights[column] = max(heights[column], sizes[event.index])
    return heights
