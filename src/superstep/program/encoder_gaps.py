"""The passes of a shared encoder in the gaps of a pipeline (Optimus, Feng 2024), by a simulated clock of its tasks.

The clock runs each rank's tasks in their order, as ``simulate`` runs instructions, with work in the place of seconds
and without transfers. Where a rank would wait for at least half of a pass, it encodes: backward passes first, then the
next microbatch. At the latest it encodes where ``add_encoder`` does; backward passes may come up to 2 · pp microbatches
later. A rank with less other work encodes more microbatches.

    1f1b, pp=2, m=8; E and G are the encoder's forward and backward pass
    rank 0  E0 F0 F1 E2 E3 E5 B0 F2 G0 B1 F3 B2 F4 G2 B3 F5 G3 B4 F6 B5 E7 F7 B6 G5 B7 G7
    rank 1  E1 E4 F0 B0 F1 B1 F2 B2 F3 B3 E6 F4 B4 F5 B5 F6 B6 G1 F7 B7 G4 G6
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from superstep.program.encoder_tasks import FORWARD, ahead_of, go_round
from superstep.program.schedule import Order, StageTask

Work = Callable[[StageTask], float]
"""How long a task takes, in any unit."""


def share_by_work(order: Order, microbatches: int, work: Work) -> tuple[int, ...]:
    """The rank that encodes each microbatch, so that all ranks have as much to do as each other; each has one or more.

    Args:
        order: of the other stages.
        microbatches: m.
        work: of a task.
    """
    encode = work(StageTask(FORWARD, 0, 0)) + work(StageTask("backward", 0, 0))
    load = [sum(map(work, tasks)) + encode for tasks in order]
    counts = [1] * len(order)
    for _ in range(microbatches - len(order)):
        rank = load.index(min(load))
        load[rank] += encode
        counts[rank] += 1
    given = [0] * len(order)
    encoding = []
    for m in range(microbatches):
        owed = [count * (m + 1) / microbatches - had for count, had in zip(counts, given, strict=True)]
        open_ranks = [rank for rank in go_round(len(order), len(order)) if given[rank] < counts[rank]]
        rank = max(open_ranks, key=owed.__getitem__)
        given[rank] += 1
        encoding.append(rank)
    return tuple(encoding)


def fill_gaps(order: Order, encoding: Sequence[int], work: Work) -> Order:
    """The tasks with those of the encoder.

    Args:
        order: of the other stages, one for each rank.
        encoding: the rank that encodes each microbatch.
        work: of a task.
    """
    last = max(task.stage for tasks in order for task in tasks)
    ranks = [_Rank(number, tasks, encoding, len(order), last, work) for number, tasks in enumerate(order)]
    ends: dict[StageTask, float] = {}
    while moving := [rank for rank in ranks if rank.step(ends)]:
        assert moving
    assert all(rank.is_done for rank in ranks), "the tasks of a schedule wait for each other in a ring"
    return tuple(tuple(rank.tasks) for rank in ranks)


class _Rank:
    """One rank on the clock.

    Args:
        number: of the rank.
        tasks: its own.
        encoding: the rank that encodes each microbatch.
        pp: the number of ranks.
        last: the last stage.
        work: of a task.
    """

    def __init__(
        self, number: int, tasks: Sequence[StageTask], encoding: Sequence[int], pp: int, last: int, work: Work
    ) -> None:
        own = [m for m, place in enumerate(encoding) if place == number]
        self.number, self.pp, self.last, self.work = number, pp, last, work
        self.left = deque(tasks)
        self.forwards, self.backwards = deque(own), deque(own)
        self.tasks: list[StageTask] = []
        self.clock = 0.0
        self.returned = -1

    @property
    def is_done(self) -> bool:
        return not (self.left or self.forwards or self.backwards)

    def step(self, ends: dict[StageTask, float]) -> bool:
        """Run the next task, if it is known when what it needs is there."""
        task = self._choose(ends)
        ready = None if task is None else self._ready(task, ends)
        if task is None or ready is None:
            return False
        self.clock = ends[task] = max(self.clock, ready) + self.work(task)
        self.tasks.append(task)
        if task.stage:
            self.left.popleft()
            self.returned = task.microbatch if task.kind in ("backward", "input") else self.returned
        else:
            (self.forwards if task.kind == FORWARD else self.backwards).popleft()
        return True

    def _choose(self, ends: dict[StageTask, float]) -> StageTask | None:
        forward = StageTask(FORWARD, 0, self.forwards[0]) if self.forwards else None
        backward = StageTask("backward", 0, self.backwards[0]) if self.backwards else None
        if not self.left:
            return forward or backward
        task = self.left[0]
        if forward and task.kind == FORWARD and forward.microbatch <= task.microbatch + ahead_of(self.number):
            return forward
        if backward and backward.microbatch + self.number + 2 * self.pp <= self.returned:
            return backward
        ready = self._ready(task, ends)
        if ready is None:
            return None
        gap = ready - self.clock
        for encode in (backward, forward):
            at = None if encode is None else self._ready(encode, ends)
            if encode and at is not None and at <= self.clock and self.work(encode) <= 2 * gap:
                return encode
        return task

    def _ready(self, task: StageTask, ends: dict[StageTask, float]) -> float | None:
        """When what a task needs from other tasks is there; None if that is not known yet."""
        needed = self._list_needs(task)
        return 0.0 if not needed else next((ends[other] for other in needed if other in ends), None)

    def _list_needs(self, task: StageTask) -> tuple[StageTask, ...]:
        """Of these tasks the one that exists has what the task needs."""
        if task.kind == FORWARD:
            return (StageTask(FORWARD, task.stage - 1, task.microbatch),) if task.stage else ()
        if task.kind == "weight" or task.stage == self.last:
            return ()
        return tuple(StageTask(kind, task.stage + 1, task.microbatch) for kind in ("backward", "input"))
