"""Curves besides those of every run: numbers of a loss, and of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MOST_POINTS = 1000
"""The most points of a curve."""

Point = tuple[str, str, int, float | None]
"""Title of the chart, label of the curve, step, value."""

TITLES = {"entropy": "Entropy of the policy", "reference_kl": "Distance from the reference (KL)"}


def charts_of(lines: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """[title, [[label, steps, values], ...]] of each chart, in order of first appearance."""
    charts: dict[str, dict[str, tuple[list[int], list[float | None]]]] = {}
    for line in lines:
        for title, label, step, value in _points(line):
            steps, values = charts.setdefault(title, {}).setdefault(label, ([], []))
            steps.append(step)
            values.append(value)
    return [
        [title, [[label, _thin(steps), _thin(values)] for label, (steps, values) in curves.items()]]
        for title, curves in charts.items()
    ]


def _points(line: Mapping[str, Any]) -> Iterator[Point]:
    step = line.get("step", 0)
    match line["event"]:
        case "rolled":
            answers, seconds = line["answers"] + line["lost"], line["seconds"] or 1
            yield "Reward", "mean of all answers", step, line["reward"]
            yield "Tokens of an answer", "mean", step, line["drawn_tokens"] / answers if answers else None
            yield (
                "Sampled tokens a second",
                "of the whole iteration",
                step,
                line["drawn_tokens"] / seconds,
            )
            yield "Share of the answers", "cut off", step, line["cut"] / answers if answers else None
            yield "Share of the answers", "without a grade", step, line["lost"] / answers if answers else None
            yield "Groups whose rewards are all equal", "of a step", step, line["uniform"]
            yield "Steps that the sampling weights are behind", "lag", step, line["lag"]
            for name, value in line["measures"].items():
                yield TITLES.get(name, f"Policy: {name}"), name, step, value
        case "measures":
            for name, value in zip(line["names"], line["values"], strict=True):
                yield TITLES.get(name, f"Loss: {name}"), name, step, value


def _thin(values: Sequence[Any]) -> list[Any]:
    """Evenly spaced values, and the last."""
    each = -(-len(values) // MOST_POINTS)
    kept = list(values[::each])
    return kept if (len(values) - 1) % each == 0 else [*kept, values[-1]]
