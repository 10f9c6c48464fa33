"""The passes of an encoder that every pipeline rank holds, in the lists of tasks of a schedule.

An encoder's units are the first stage. A microbatch's pictures are encoded whole on one rank, so that their gradients
have the same bits wherever that is; the microbatches go round the ranks. The rows go from there to the first rank,
which has the next stage, and their gradients come back the same way.

    1f1b, pp=2, m=4; E and G are the encoder's forward and backward pass
    front    a stage of its own on rank 0, where rank 1 has the decoder
    spread   rank 0  E0 F0 F1 B0 G0 E2 F2 B1 F3 B2 G2 B3
             rank 1  E1 F0 B0 E3 F1 B1 G1 F2 B2 F3 B3 G3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from superstep.program.schedule import Kind, Order, StageTask

FORWARD: Kind = "forward"


def shift_stages(order: Order) -> Order:
    """The same tasks, of stages that have another one in front."""
    return tuple(tuple(StageTask(t.kind, t.stage + 1, t.microbatch) for t in tasks) for tasks in order)


def go_round(ranks: int, microbatches: int) -> tuple[int, ...]:
    """The rank that encodes each microbatch: one after the other."""
    return tuple(m % ranks for m in range(microbatches))


def ahead_of(rank: int) -> int:
    """How many microbatches the first rank may be ahead of another, and so the encoder there."""
    return rank + 1 if rank else 0


def add_encoder(order: Order, encoding: Sequence[int]) -> Order:
    """The tasks with those of the encoder.

    A rank encodes before the first rank comes to the microbatch, which is up to one task for each rank between ahead of
    it; gradients come as many tasks after the rank's own.

    Args:
        order: of the other stages, one for each rank.
        encoding: the rank that encodes each microbatch.
    """
    return tuple(
        tuple(_with_encoder(tasks, rank, [m for m, place in enumerate(encoding) if place == rank]))
        for rank, tasks in enumerate(order)
    )


def _with_encoder(tasks: Sequence[StageTask], rank: int, own: Sequence[int]) -> Iterator[StageTask]:
    forwards = deque(own)
    backwards = deque(own if any(task.kind != "forward" for task in tasks) else ())
    for task in tasks:
        while task.kind == "forward" and forwards and forwards[0] <= task.microbatch + ahead_of(rank):
            yield StageTask("forward", 0, forwards.popleft())
        yield task
        while task.kind in ("backward", "input") and backwards and backwards[0] <= task.microbatch - rank:
            yield StageTask("backward", 0, backwards.popleft())
    yield from (StageTask("backward", 0, m) for m in backwards)
