"""What ``bench.published`` has found, as lines and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.published_ablation import Ablated
from bench.published_ablation_memory import Without
from bench.published_calibrated import Choice, Drawn
from bench.published_memory import Labels, Peaks, by_share, peaks_interval
from bench.published_score import Scored, Sweep, summary
from bench.published_stated import Stated
from superstep.cost.closed.uncertainty import Spread
from superstep.hardware.units import Array

Line = tuple[int, float, float]


@dataclass(frozen=True, slots=True)
class Intervals:
    """80% intervals of rows whose stacks were left out.

    Attributes:
        spread: what makes one wide.
        inside: whether each row lies in the one that the other stacks give it.
        by_stack: of each stack's rows, the share that does.
        judged: of complete plans.
        but_largest: of all rows but those of the stack that has the most.
    """

    spread: Spread
    inside: Array
    by_stack: Mapping[str, float]
    judged: float
    but_largest: float


@dataclass(frozen=True, slots=True)
class AfterRow:
    """Rows of stacks left out, after one row of each was seen.

    Attributes:
        lines: by which row was seen.
        inside: of them, the share within their narrowed intervals.
        of_halves: the median error after the row in the middle, over random halves of the tables.
        any_in_hindsight: that after any row, if each table's best share of its deviation were known.
    """

    lines: Mapping[Choice, Line]
    inside: Mapping[Choice, float]
    of_halves: Drawn
    any_in_hindsight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that is told.

    Attributes:
        lines: rows, median and 90th percentile by what was asked.
        refused: rows' names and why nothing is predicted of them.
        ours: with the constants in use.
        left_out: the same rows, each predicted without its stack; nothing where that was not asked for.
        intervals: from these.
        after_row: how near they come once one row was seen.
        sweeps, sweeps_left_out: the order of plans.
        peaks, labels: memory, with frameworks' names known.
        memory_left_out: the same without the names that only a stack's own rows bear.
        stated: that, where one property of such a software is told.
        ablations, memory_ablations: by mechanism.
    """

    lines: Mapping[str, Line]
    refused: Sequence[tuple[str, str]]
    ours: Scored
    left_out: Scored | None
    intervals: Intervals | None
    after_row: AfterRow | None
    sweeps: Sequence[Sweep]
    sweeps_left_out: Sequence[Sweep]
    peaks: Peaks
    labels: Labels
    memory_left_out: tuple[Peaks, Labels] | None
    stated: Mapping[str, Stated]
    ablations: Mapping[str, Ablated]
    memory_ablations: Mapping[str, Without]


def print_sources(ours: Scored, flat: Scored) -> None:
    """One line a source and trust."""
    print(f"{'source':26}{'trust':>6}{'rows':>6}{'median':>9}{'90th':>8}{'bias':>7}   {'constant fraction':>18}")
    for source, trust in dict.fromkeys((row["source"], row["trust"]) for row in ours.rows):
        mine = ours.where(lambda row, s=source, t=trust: (row["source"], row["trust"]) == (s, t))  # type: ignore[misc]
        base = flat.where(lambda row, s=source, t=trust: (row["source"], row["trust"]) == (s, t))  # type: ignore[misc]
        count, median, ninth = summary(mine)
        bias = float(np.median(mine.predicted_s / mine.published_s))
        print(f"{source:26}{trust:>6}{count:6d}{median:9.1%}{ninth:8.1%}{bias:7.2f}   {summary(base)[1]:18.1%}")


def print_sweeps(sweeps: Sequence[Sweep]) -> None:
    """One line a sweep."""
    print(f"\n{'sweep':60}{'plans':>6}{'Spearman':>10}{'chosen':>9}")
    for each in sweeps:
        print(f"{each.name:60}{each.plans:6d}{each.spearman:10.3f}{each.loss:+9.1%}")
    print()


def write(path: str, result: Result) -> None:
    """Everything as JSON."""
    told = {
        "summary": {name: _line(line) for name, line in result.lines.items()},
        "refused": [{"row_id": name, "why": why} for name, why in result.refused],
        "memory": _memory(result.peaks),
        "memory_interval": dict(zip(("low", "high", "covered"), peaks_interval(result.peaks), strict=True)),
        "fits": _fits(result.labels),
        "fits_by_share": by_share(result.labels),
        **_left_out(result),
        "sources": _sources(result.ours),
        "sources_left_out": _sources(result.left_out) if result.left_out else {},
        "sweeps": _sweeps(result.sweeps),
        "sweeps_left_out": _sweeps(result.sweeps_left_out),
        "ablations": {name: asdict(each) for name, each in result.ablations.items()},
        "memory_ablations": {name: asdict(each) for name, each in result.memory_ablations.items()},
        "rows": _rows(result),
    }
    Path(path).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _line(line: Line) -> dict[str, float]:
    return dict(zip(("rows", "median", "p90"), line, strict=True))


def _memory(peaks: Peaks) -> dict[str, float | None]:
    median, ninth = np.quantile(peaks.errors, (0.5, 0.9)) if len(peaks.rows) else (None, None)
    return {"rows": len(peaks.rows), "median": median, "p90": ninth}


def _fits(labels: Labels) -> dict[str, float]:
    count, right = labels.right
    false, missed = labels.wrong
    return {"rows": count, "out": int(labels.published.sum()), "right": right, "false_alarms": false, "missed": missed}


def _left_out(result: Result) -> dict[str, object]:
    if result.memory_left_out is None or result.intervals is None or result.after_row is None:
        return {}
    peaks, labels = result.memory_left_out
    inside = result.intervals
    return {
        "memory_left_out": _memory(peaks),
        "fits_left_out": _fits(labels),
        "stated": {words: asdict(each) for words, each in result.stated.items()},
        "intervals": {
            "covered": float(inside.inside.mean()),
            "judged": inside.judged,
            "but_largest": inside.but_largest,
            "by_stack": inside.by_stack,
            "spread": asdict(inside.spread),
        },
        "after_row": {
            "inside": dict(result.after_row.inside),
            "of_halves": asdict(result.after_row.of_halves),
            "any_in_hindsight": result.after_row.any_in_hindsight,
        },
    }


def _sources(scored: Scored) -> dict[str, dict[str, float]]:
    sources = dict.fromkeys(row["source"] for row in scored.rows)
    return {s: _line(summary(scored.where(lambda row, s=s: row["source"] == s))) for s in sources}  # type: ignore[misc]


def _sweeps(sweeps: Sequence[Sweep]) -> list[dict[str, object]]:
    return [asdict(each) for each in sweeps]


def _rows(result: Result) -> list[dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    ours, peaks, labels = result.ours, result.peaks, result.labels
    for row, p, q in zip(ours.rows, ours.published_s, ours.predicted_s, strict=True):
        rows[row["row_id"]] = {"published_s": float(p), "predicted_s": float(q)}
    if result.left_out:
        for row, q in zip(ours.rows, result.left_out.predicted_s, strict=True):
            rows[row["row_id"]]["left_out_s"] = float(f"{q:.5g}")
    for row, p, q in zip(peaks.rows, peaks.published, peaks.predicted, strict=True):
        rows.setdefault(row["row_id"], {}).update(published_mem_gb=float(p), predicted_mem_gb=round(float(q), 2))
    for row, p, q in zip(labels.rows, labels.published, labels.predicted, strict=True):
        rows.setdefault(row["row_id"], {}).update(published_oom=bool(p), predicted_oom=bool(q))
    known = {row["row_id"]: row["source"] for row in (*ours.rows, *peaks.rows, *labels.rows)}
    return [{"row_id": name, "source": known[name], **values} for name, values in rows.items()]
