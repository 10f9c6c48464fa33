"""The lane of graders: it requests grades when answers are recorded, and waits for them when a step needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from superstep.errors import Fault
from superstep.grade.task import Rollout
from superstep.grade.verdict import Verdict
from superstep.tune.program.instructions import Grade, Iterations
from superstep.tune.rl.from_rank0 import WaitLimit
from superstep.tune.rl.rollout_log import RolloutLog

Retried = Callable[[Verdict], None]


def nothing_retried(verdict: Verdict) -> None:
    """A ``Retried`` that does nothing."""


class Graders(Protocol):
    """Interface of ``grade.workers.pool.Pool``."""

    def submit(self, index: int, seed: int, rollout: Rollout) -> Future[Verdict]:
        """A future of the verdict."""


class Grading:
    """The lane of graders. It works on the rank with the rollout log; on other ranks it does nothing.

    Args:
        record: the rollout log.
        graders: the graders; None on the other ranks.
        seed: the seed of the tasks.

    Attributes:
        heard: called on any thread when a grade arrives; does nothing by default.
    """

    def __init__(self, record: RolloutLog, graders: Graders | None, seed: int) -> None:
        self._record = record
        self._graders = graders
        self._seed = seed
        self._pending: dict[int, list[Future[Verdict]]] = {}
        self.heard: Callable[[], None] = _nothing

    def begin(self, program: Iterations) -> None:
        """Request grades for a program's recorded groups that have none."""
        for i in program.lane("grader"):
            assert isinstance(i, Grade), "the grader grades"
            if i.group in self._record.groups:
                self.submit(i.group)

    def submit(self, place: int) -> None:
        """Request grades of a recorded group. Thread-safe."""
        if self._graders is not None and place not in self._record.verdicts:
            group = self._record.groups[place]
            pending = [self._graders.submit(group.number, self._seed, answer.rollout) for answer in group.answers]
            self._pending[group.number] = pending
            for one in pending:
                one.add_done_callback(lambda _: self.heard())

    def is_done(self, place: int) -> bool:
        """Whether a group is recorded and all its grades have arrived."""
        pending = self._pending.get(self._record.task(place), [])
        return place in self._record.groups and all(one.done() for one in pending)

    def collect(self, places: Sequence[int], beat_s: float, patience: WaitLimit) -> list[tuple[Verdict, ...]] | None:
        """The grades of recorded groups; None if some are missing after ``beat_s``.

        Raises:
            ConfigError: the environment has no such task.
            Fault: the grader is late.
        """
        until_s = time.monotonic() + beat_s
        for place in places:
            number = self._record.task(place)
            pending = self._pending.get(number, [])
            for one in pending:
                try:
                    one.result(min(max(0.0, until_s - time.monotonic()), patience.left_s))
                except TimeoutError:
                    if patience.left_s:
                        return None
                    late = f"the grader has no grades of task {number} after {patience.seconds:g} s."
                    raise Fault(late) from None
            if pending:
                self._record.record_grades(number, tuple(one.result() for one in pending))
                del self._pending[number]
        return [self._record.verdicts[place] for place in places]


def _nothing() -> None:
    """The default of ``heard``."""
