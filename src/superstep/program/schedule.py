"""Schedules: the order of microbatches through stages, as the papers draw them.

A schedule gives each pipeline rank its list of tasks, over the stages that ``placement`` puts there. F is a forward
pass, B a backward pass; where the backward pass has two halves, B is that of the inputs and W that of the weights.

    gpipe, pp=2, m=3            1f1b, pp=2, m=3             zb-h1, pp=2, m=3
    rank 0  F0 F1 F2 B0 B1 B2   rank 0  F0 F1 B0 F2 B1 B2   rank 0  F0 F1 B0 W0 F2 B1 W1 B2 W2
    rank 1  F0 F1 F2 B0 B1 B2   rank 1  F0 B0 F1 B1 F2 B2   rank 1  F0 B0 F1 B1 W0 F2 B2 W1 W2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from superstep.plan.config import Schedule

Kind: TypeAlias = Literal["forward", "backward", "input", "weight"]


@dataclass(frozen=True, slots=True)
class StageTask:
    """A stage's pass over one microbatch: forward, backward, or half of a backward."""

    kind: Kind
    stage: int
    microbatch: int


Order = tuple[tuple[StageTask, ...], ...]


def order(name: Schedule, *, placement: Sequence[int], microbatches: int, group: int) -> Order:
    """The tasks of each pipeline rank.

    Args:
        placement: the pipeline rank of each stage; one stage on each for gpipe, 1f1b and zb-h1, two for zb-v.
        microbatches: m.
        group: microbatches that pass one stage before the rank turns to its next stage; divides m, and is at least pp
        where a rank has several stages.
    """
    stages, m = _stages(placement), microbatches
    pp = len(stages)
    match name:
        case "gpipe":
            return tuple(_all_forward_all_backward(own, m, m) for own in stages)
        case "1f1b":
            return tuple(_one_forward_one_backward(own, pp - rank, m) for rank, own in enumerate(stages))
        case "interleaved":
            return tuple(_interleave(own, pp - rank, m, group) for rank, own in enumerate(stages))
        case "breadth-first":
            return tuple(_all_forward_all_backward(own, m, group) for own in stages)
        case "zb-h1":
            return tuple(_zero_bubble(own[0], rank, pp, m) for rank, own in enumerate(stages))
        case "zb-v":
            return tuple(_zero_bubble_v(own, rank, pp, m) for rank, own in enumerate(stages))


def forward_order(*, placement: Sequence[int], microbatches: int) -> Order:
    """Forward passes only, for validation."""
    return tuple(tuple(_tasks("forward", own, range(microbatches))) for own in _stages(placement))


def _stages(placement: Sequence[int]) -> list[list[int]]:
    return [[s for s, place in enumerate(placement) if place == rank] for rank in range(max(placement) + 1)]


def _tasks(kind: Kind, stages: Sequence[int], microbatches: range) -> Iterator[StageTask]:
    """Every microbatch through one stage, then through the next; backward from the last stage."""
    for stage in stages if kind == "forward" else reversed(stages):
        for m in microbatches:
            yield StageTask(kind, stage, m)


def _all_forward_all_backward(stages: Sequence[int], m: int, group: int) -> tuple[StageTask, ...]:
    """GPipe (Huang 2019), and with several stages its looped form, breadth-first (Lamy-Poirier 2023, fig. 4).

    A group goes forward through every stage, then back; smaller groups hold fewer activations and drain the pipeline
    more often.
    """
    tasks: list[StageTask] = []
    for start in range(0, m, group):
        members = range(start, start + group)
        tasks += [*_tasks("forward", stages, members), *_tasks("backward", stages, members)]
    return tuple(tasks)


def _one_forward_one_backward(stages: Sequence[int], below: int, m: int) -> tuple[StageTask, ...]:
    """PipeDream-Flush (Narayanan 2021, sec. 2.2): at most ``below`` microbatches in flight."""
    forwards, backwards = list(_tasks("forward", stages, range(m))), list(_tasks("backward", stages, range(m)))
    return _steady(forwards, backwards, warmup=min(below - 1, m))


def _interleave(stages: Sequence[int], below: int, m: int, group: int) -> tuple[StageTask, ...]:
    """Interleaved 1F1B (Narayanan 2021, sec. 2.2): groups go depth-first through the stages of a rank.

    The warm-up is what must be in flight before the first backward can reach this rank: all earlier stages of the first
    group, and two slots for every rank after it.
    """
    forwards: list[StageTask] = []
    backwards: list[StageTask] = []
    for start in range(0, m, group):
        members = range(start, start + group)
        forwards += _tasks("forward", stages, members)
        backwards += _tasks("backward", stages, members)
    warmup = 2 * (below - 1) + (len(stages) - 1) * group
    return _steady(forwards, backwards, warmup=min(warmup, len(forwards)))


def _steady(forwards: list[StageTask], backwards: list[StageTask], *, warmup: int) -> tuple[StageTask, ...]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    tasks = forwards[:warmup]
    for i, forward in enumerate(forwards[warmup:]):
        tasks += [forward, backwards[i]]
    tasks += backwards[len(forwards) - warmup :]
    return tuple(tasks)


def _zero_bubble(stage: int, rank: int, pp: int, m: int) -> tuple[StageTask, ...]:
    """ZB-H1 (Qi 2023, sec. 2.1): 1F1B with delayed weight passes, on rank r by r backward passes.

    So later ranks send their first gradients sooner, and fill the end with delayed passes. At most pp microbatches have
    a forward and no weight pass yet, on every rank as on the first of 1F1B.
    """
    tasks: list[StageTask] = []
    for task in _one_forward_one_backward([stage], pp - rank, m):
        if task.kind == "forward":
            tasks.append(task)
            continue
        tasks.append(StageTask("input", stage, task.microbatch))
        if task.microbatch >= rank:
            tasks.append(StageTask("weight", stage, task.microbatch - rank))
    return (*tasks, *_tasks("weight", [stage], range(max(m - rank, 0), m)))


def _zero_bubble_v(stages: Sequence[int], rank: int, pp: int, m: int) -> tuple[StageTask, ...]:
    """ZB-V (Qi 2023, sec. 6): a rank has a stage on the way down the V and one on the way up.

    Where F, B and W take the same time, no rank waits between its first and last task. At most 2·pp stages' activations
    are kept, as many bytes as on 1F1B's first rank. The pattern needs 2·pp - 1 microbatches; with fewer, the missing
    ones are left out of it.
    """
    down, up = stages
    tasks: list[StageTask] = []
    count = {(kind, stage): 0 for kind in ("forward", "input", "weight") for stage in stages}

    def run(*pattern: tuple[Kind, int], times: int = 1) -> None:
        """Each pass of the pattern over its next microbatch."""
        for kind, stage in pattern * times:
            tasks.append(StageTask(kind, stage, count[kind, stage]))
            count[kind, stage] += 1

    total = max(m, 2 * pp - 1)
    # Until the first microbatch is back up; then until its first gradient has come down to this rank.
    run(("forward", down), times=2 * (pp - rank) - 1)
    run(("forward", up), ("forward", down), times=rank)
    run(("forward", up), ("input", up), ("weight", up), times=pp - rank)
    # Steady: each forward is paid for by a backward.
    while count["forward", up] < total:
        if count["forward", down] < total:
            run(("forward", down))
        run(("input", down), ("weight", down), ("forward", up), ("input", up), ("weight", up))
    # Gradients first while other ranks wait for them, what their weights are owed after.
    run(("input", down), ("input", up), times=rank)
    run(("input", down), ("weight", down), times=pp - rank)
    for stage in (up, down):
        run(("weight", stage), times=total - count["weight", stage])
    return tuple(task for task in tasks if task.microbatch < m)
