"""The report of superstep grade check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from superstep.grade.attacks.attack_grader import AttackReport, Weakness
from superstep.grade.sandbox.sandbox import MemoryBound

MEANT = {
    "scores": "is paid {score:g}",
    "breaks": "breaks the grader",
    "refuses": "is right and gets {score:g}",
    "varies": "is right and gets two different scores",
}


BOUNDS: dict[MemoryBound, str] = {
    "cgroup": "by a cgroup",
    "watched": "by watching their processes, because no cgroup can be made here",
}
"""How the memory of candidates' programs is limited."""

WORST_FIRST = tuple(MEANT)
MOST = 20
"""Weaknesses that are listed: one mistake of a grader may be open to every attack."""


def report_lines(path: Path, report: AttackReport) -> Iterator[str]:
    """Lines for each weakness, with its answer, and a summary."""
    weaknesses = sorted(report.weaknesses, key=lambda weakness: WORST_FIRST.index(weakness.flaw))
    for weakness in weaknesses[:MOST]:
        yield f"WEAK  {_describe_weakness(weakness, report.tasks)}"
        yield f"      task {weakness.index}, answered {weakness.answer}"
        if weakness.verdict.why:
            yield f"      {weakness.verdict.why}"
    if weaknesses[MOST:]:
        yield f"      ... and {len(weaknesses) - MOST} more"
    if not report.has_solutions:
        yield "No task has a solution, so the check did not test whether right answers score; set Task(solution=...)."
    if report.memory_bound is None:
        yield "The grader runs no program, so the check needed no sandbox; there is none here."
    else:
        yield f"The memory of programs is bounded {BOUNDS[report.memory_bound]}."
    tried = f"{report.attacks} attacks on {report.tasks} tasks, {report.graded} grades"
    if weaknesses:
        yield f"{path} is WEAK: {_count_text(len(weaknesses))}, {tried}."
    else:
        yield f"{path} held: {tried}, none of them got a score."


def _describe_weakness(weakness: Weakness, tasks: int) -> str:
    meant = MEANT[weakness.flaw].format(score=weakness.verdict.score)
    where = f", on {weakness.tasks} of {tasks} tasks" if weakness.tasks > 1 else ""
    return f"{weakness.attack}: {meant}{where}"


def _count_text(number: int) -> str:
    return "1 weakness" if number == 1 else f"{number} weaknesses"
