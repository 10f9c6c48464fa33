"""What superstep grade check prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from superstep.grade.attacks.check import Report, Weakness

MEANT = {
    "scores": "is paid {score:g}",
    "breaks": "breaks the grader",
    "refuses": "is right and gets {score:g}",
    "varies": "is right and is graded in two ways",
}


def report_lines(path: Path, report: Report) -> Iterator[str]:
    """A line for each weakness, with what was answered, and a line for the whole."""
    for weakness in report.weaknesses:
        yield f"WEAK  {_told(weakness, report.tasks)}"
        yield f"      task {weakness.index}, answered {weakness.answer}"
        if weakness.told.why:
            yield f"      {weakness.told.why}"
    if not report.has_solutions:
        yield "No task has a solution, so it was not seen whether right answers score; give Task(solution=...)."
    tried = f"{report.attacks} attacks on {report.tasks} tasks, {report.graded} grades"
    if report.weaknesses:
        yield f"{path} is WEAK: {len(report.weaknesses)} of {tried}."
    else:
        yield f"{path} held: {tried}, none of them paid."


def _told(weakness: Weakness, tasks: int) -> str:
    meant = MEANT[weakness.flaw].format(score=weakness.told.score)
    where = f", on {weakness.tasks} of {tasks} tasks" if weakness.tasks > 1 else ""
    return f"{weakness.attack}: {meant}{where}"
