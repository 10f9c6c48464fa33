"""Schedules: the order of microbatches through stages, as the papers draw them.

A schedule gives each pipeline rank its list of tasks. Stage s runs on rank s mod pp; with ``chunks`` v there
are v · pp stages, and rank r holds stages r, r + pp, r + 2·pp, ... (the loop of Narayanan 2021, fig. 4).

    gpipe, pp=2, m=3            1f1b, pp=2, m=3
    rank 0  F0 F1 F2 B0 B1 B2   rank 0  F0 F1 B0 F2 B1 B2
    rank 1  F0 F1 F2 B0 B1 B2   rank 1  F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from superstep.plan.config import Schedule


@dataclass(frozen=True, slots=True)
class Task:
    """One stage's forward (``is_forward``) or backward pass over one microbatch."""

    is_forward: bool
    stage: int
    microbatch: int


Order = tuple[tuple[Task, ...], ...]


def order(name: Schedule, *, pp: int, chunks: int, microbatches: int, group: int) -> Order:
    """The tasks of each pipeline rank.

    Args:
        name: which schedule.
        pp: pipeline ranks.
        chunks: stages on each rank; 1 for gpipe and 1f1b.
        microbatches: m.
        group: microbatches that pass one stage before the rank turns to its next stage; divides m, and is at
            least pp where chunks > 1.
    """
    ranks = range(pp)
    match name:
        case "gpipe":
            return tuple(_all_forward_all_backward(r, pp, 1, microbatches, microbatches) for r in ranks)
        case "1f1b":
            return tuple(_one_forward_one_backward(r, pp, microbatches) for r in ranks)
        case "interleaved":
            return tuple(_interleaved(r, pp, chunks, microbatches, group) for r in ranks)
        case "breadth-first":
            return tuple(_all_forward_all_backward(r, pp, chunks, microbatches, group) for r in ranks)


def forward_order(*, pp: int, chunks: int, microbatches: int) -> Order:
    """Forward passes only, for validation."""
    return tuple(tuple(_forwards(r, pp, chunks, range(microbatches))) for r in range(pp))


def _forwards(rank: int, pp: int, chunks: int, microbatches: range) -> Iterator[Task]:
    for chunk in range(chunks):
        for m in microbatches:
            yield Task(is_forward=True, stage=chunk * pp + rank, microbatch=m)


def _backwards(rank: int, pp: int, chunks: int, microbatches: range) -> Iterator[Task]:
    for chunk in reversed(range(chunks)):
        for m in microbatches:
            yield Task(is_forward=False, stage=chunk * pp + rank, microbatch=m)


def _all_forward_all_backward(rank: int, pp: int, chunks: int, m: int, group: int) -> tuple[Task, ...]:
    """GPipe (Huang 2019), and with chunks its looped kin, breadth-first (Lamy-Poirier 2023, fig. 4).

    A group is forwarded through every chunk, then taken back; smaller groups hold fewer activations and drain
    the pipeline more often.
    """
    tasks: list[Task] = []
    for start in range(0, m, group):
        members = range(start, start + group)
        tasks += [*_forwards(rank, pp, chunks, members), *_backwards(rank, pp, chunks, members)]
    return tuple(tasks)


def _one_forward_one_backward(rank: int, pp: int, m: int) -> tuple[Task, ...]:
    """PipeDream-Flush (Narayanan 2021, sec. 2.2): at most pp - rank microbatches in flight."""
    forwards = list(_forwards(rank, pp, 1, range(m)))
    backwards = list(_backwards(rank, pp, 1, range(m)))
    return _steady(forwards, backwards, warmup=min(pp - rank - 1, m))


def _interleaved(rank: int, pp: int, chunks: int, m: int, group: int) -> tuple[Task, ...]:
    """Interleaved 1F1B (Narayanan 2021, sec. 2.2): groups go depth-first through the chunks of a rank.

    The warm-up is what must be in flight before the first backward can reach this rank: all earlier chunks of
    the first group, and two slots for every rank below.
    """
    forwards: list[Task] = []
    backwards: list[Task] = []
    for start in range(0, m, group):
        members = range(start, start + group)
        forwards += _forwards(rank, pp, chunks, members)
        backwards += _backwards(rank, pp, chunks, members)
    warmup = 2 * (pp - rank - 1) + (chunks - 1) * group
    return _steady(forwards, backwards, warmup=min(warmup, len(forwards)))


def _steady(forwards: list[Task], backwards: list[Task], *, warmup: int) -> tuple[Task, ...]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""
    tasks = forwards[:warmup]
    for i, forward in enumerate(forwards[warmup:]):
        tasks += [forward, backwards[i]]
    tasks += backwards[len(forwards) - warmup :]
    return tuple(tasks)
