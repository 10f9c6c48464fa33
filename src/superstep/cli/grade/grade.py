"""superstep grade: graders over HTTP, and attacks that find weak ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.grade import CheckOptions, GradeServeOptions, read
from superstep.cli.grade.grade_text import BOUNDS, report_lines
from superstep.cli.printer import Printer
from superstep.grade.api.app import make_app
from superstep.grade.api.metrics import GradeMetrics
from superstep.grade.attacks.attack_grader import check
from superstep.grade.environment import load_environment
from superstep.grade.workers.pool import Pool
from superstep.http.port import open_port


def main(argv: Sequence[str]) -> int:
    """Run the action.

    Returns:
        1 if a check finds that the grader is weak, else 0.
    """
    path, options = read(argv)
    match options:
        case GradeServeOptions():
            return _serve(path, options)
        case CheckOptions():
            return _check(path, options)


def _serve(path: Path, options: GradeServeOptions) -> int:
    metrics, console = GradeMetrics(), Printer()
    with open_port(options.host, options.port, names=options.allowed_hosts, grace_s=options.grace_s) as port:
        load_environment(path).task(0, 0)  # raises at once if the file has no task
        with Pool(path, options.grade, retried=metrics.count_retry) as pool:
            sandbox = "in bubblewrap" if pool.config.sandbox == "bubblewrap" else "WITHOUT A SANDBOX, as this user"
            memory = f"their memory is bounded {BOUNDS[pool.memory_bound]}"
            console.say(
                f"Grading {path} at {port.url}/grade, {pool.workers} at a time; programs run {sandbox}, {memory}."
            )
            return port.serve(make_app(pool, metrics, entrance=port.entrance), tell=console.warn)


def _check(path: Path, options: CheckOptions) -> int:
    environment = load_environment(path)
    with Pool(path, options.grade, is_heard=False, needs_sandbox=False) as pool:
        report = check(environment, pool, tasks=options.tasks, seed=options.seed, tell=_progress)
    for line in report_lines(path, report):
        print(line)
    return 1 if report.weaknesses else 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rtask {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
