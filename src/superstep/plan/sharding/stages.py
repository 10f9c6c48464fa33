"""Stages: the units of each one, and its pipeline rank."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig, Schedule
from superstep.plan.model.outline import Outline
from superstep.plan.model.shape import ModelShape
from superstep.plan.sharding.encoder import check_rows, count_in_front
from superstep.plan.sharding.unit_flops import forward_flops_per_token


def place(schedule: Schedule, *, pp: int, chunks: int, in_front: int = 0) -> tuple[int, ...]:
    """The pipeline rank of each stage.

    Stages go round the ranks (the loop of Narayanan 2021, fig. 4), with zb-v down and up again (Qi 2023, sec. 6):

        pp=3, chunks=2      loop  0 1 2 0 1 2       V  0 1 2 2 1 0

    A stage in front, which all ranks have, counts as the first rank's.
    """
    front = (0,) * in_front
    if schedule == "zb-v":
        return (*front, *range(pp), *reversed(range(pp)))
    return front + tuple(range(pp)) * chunks


def stages_of(config: RunConfig, shape: ModelShape | None, outline: Outline) -> tuple[tuple[int, ...], ...]:
    """The unit numbers of each stage: the plan's split, or the one whose largest stage has the least work. An encoder
    that every pipeline rank holds is a stage in front of them.

    Args:
        config: with a filled plan.
        shape: of the decoder; None for a user's model.
        outline: of the model.

    Raises:
        ConfigError: the plan's numbers are not one for each stage, or do not add up to the units.
    """
    plan, in_front = config.plan, count_in_front(outline, config.plan)
    front = (tuple(range(in_front)),) if in_front else ()
    work = _work(config, shape, outline)[in_front:]
    count = plan.pp * plan.chunks
    if plan.stages is None:
        return check_rows(config, outline, (*front, *_runs(even_split(work, count), in_front)))
    if len(plan.stages) != count or sum(plan.stages) != len(work) or min(plan.stages) < 1:
        raise ConfigError(
            f"plan.stages = {list(plan.stages)} must have {count} numbers (plan.pp · plan.chunks), each at least 1, "
            f"that add up to {len(work)} units (the embedding, {len(work) - 2} blocks, the head); leave it out, or set "
            f"plan.stages to {list(even_split(work, count))}."
        )
    return check_rows(config, outline, (*front, *_runs(plan.stages, in_front)))


def _work(config: RunConfig, shape: ModelShape | None, outline: Outline) -> tuple[int, ...]:
    """The work of each unit's forward pass, for splitting units into stages; of a user's units, the elements that are
    not looked up.
    """
    if shape is not None:
        return forward_flops_per_token(shape, config.data.sequence_tokens)
    return tuple(sum(math.prod(p.dims) for p in unit.parameters if p.layer != "embedding") for unit in outline.units)


def even_split(work: Sequence[int], stages: int) -> tuple[int, ...]:
    """The number of units of each of ``stages`` runs, at least one, with the smallest maximum of a run's work.

    Among those splits the most even one is taken (the least sum of squares), and among equals the one with the fewest
    units in front: the first stages keep the most microbatches.
    """
    before = [0, *accumulate(work)]
    limit = _smallest_limit(work, before, stages)
    units = len(work)
    # least[i]: the least sum of squares, and the units of the first run, of units i ... split into `count` runs.
    least: list[tuple[int, int] | None] = [None] * units + [(0, 0)]
    chosen: list[list[tuple[int, int] | None]] = []
    for _ in range(stages):
        least = [_best(before, least, start, limit) for start in range(units)] + [None]
        chosen.append(least)
    counts, start = [], 0
    for row in reversed(chosen):
        cost = row[start]
        assert cost is not None, "a limit that was found can be kept"
        counts.append(cost[1])
        start += cost[1]
    return tuple(counts)


def _best(
    before: Sequence[int], rest: Sequence[tuple[int, int] | None], start: int, limit: int
) -> tuple[int, int] | None:
    """The first run from ``start`` that, with the best of the rest, has the least sum of squares."""
    best: tuple[int, int] | None = None
    for end in range(start + 1, len(before)):
        load = before[end] - before[start]
        if load > limit:
            break
        after = rest[end]
        if after is not None and (best is None or load * load + after[0] < best[0]):
            best = load * load + after[0], end - start
    return best


def _smallest_limit(work: Sequence[int], before: Sequence[int], stages: int) -> int:
    """The smallest possible work of the largest run."""

    def fits(limit: int) -> bool:
        runs, start = 0, 0
        for unit in range(len(work)):
            if before[unit + 1] - before[start] > limit:
                runs, start = runs + 1, unit
        return runs < stages

    return bisect_left(range(before[-1]), x=True, lo=max(work), key=fits)


def _runs(counts: Sequence[int], first: int) -> tuple[tuple[int, ...], ...]:
    ends = list(accumulate(counts))
    return tuple(tuple(range(first + end - count, first + end)) for count, end in zip(counts, ends, strict=True))
