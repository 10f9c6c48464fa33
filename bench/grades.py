"""Grades per second: small programs in the sandbox and without it, and numbers that are only compared, in turn.

    python -m bench.grades

A ratio is of one round: grades/s with the sandbox over grades/s without. The tasks are those of
`recipes/graded_tasks.py`, the answers their solutions, of which each must get the full score.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from bench.machine import write_result
from superstep.grade.config import GradeConfig
from superstep.grade.environment import load_environment
from superstep.grade.task import answer_rollout
from superstep.grade.workers.pool import Pool

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "recipes" / "graded_tasks.py"
PROGRAM, SUM = 2, 0
"""The kinds of tasks, as remainders of an index by 3."""


class Side:
    """A pool, and one kind of tasks."""

    def __init__(self, name: str, kind: int, config: GradeConfig) -> None:
        self.name, self._kind = name, kind
        self.pool = Pool(TASKS, config)
        self._environment = load_environment(TASKS)
        self.run(2 * self.pool.workers)  # every grader has begun

    def run(self, count: int) -> float:
        """Grades per second."""
        indices = [3 * k + self._kind for k in range(count)]
        solutions = [self._environment.task(index, 0).solution or "" for index in indices]
        began = time.perf_counter()
        asked = [
            self.pool.submit(index, 0, answer_rollout(text)) for index, text in zip(indices, solutions, strict=True)
        ]
        verdicts = [future.result() for future in asked]
        seconds = time.perf_counter() - began
        assert all(verdict.score == 1.0 for verdict in verdicts), verdicts
        return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--grades", type=int, default=60, help="programs of a round; of sums there are ten times as many"
    )
    parser.add_argument("--workers", type=int, default=None)
    options = parser.parse_args()
    boxed = Side("programs in bubblewrap", PROGRAM, GradeConfig(workers=options.workers))
    bare = Side("programs without a sandbox", PROGRAM, GradeConfig(workers=options.workers, sandbox="none"))
    sums = Side("sums", SUM, GradeConfig(workers=options.workers))
    sides = (boxed, bare, sums)
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    try:
        for _ in range(options.rounds):
            for side in sides:
                found[side.name].append(side.run(options.grades * (10 if side is sums else 1)))
    finally:
        for side in sides:
            side.pool.close()
    ratios = [one / other for one, other in zip(found[boxed.name], found[bare.name], strict=True)]
    for name, rates in found.items():
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        print(f"{name:28} {statistics.median(rates):8.1f} grades/s ({spread})")
    print(f"with the sandbox over without: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    write_result(
        ROOT / "bench" / "results" / "grades.json",
        workers=boxed.pool.workers,
        grades=options.grades,
        ratio_boxed_to_bare={"median": statistics.median(ratios), "all": ratios},
        grades_per_s=found,
    )


if __name__ == "__main__":
    main()
