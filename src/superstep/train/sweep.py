"""Every layout that fits a number of ranks, for ``prove --all``.

The mesh, the ZeRO stage and the schedule are crossed in full. What is independent of them (recompute, sequence
parallelism, rules that leave matrices whole, tied or untied head, packed or padded sequences, the size of a microbatch)
is dealt out in turn, so that every value meets every axis without a product of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, Recompute, Rule, RunConfig, Schedule
from superstep.plan.resolve import Resolved, divisors
from superstep.train.model import resolved

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
RULES: tuple[tuple[tuple[str, Rule], ...], ...] = ((), (("ffn", "none"),), (), (("vocab", "none"),))


def layouts(config: RunConfig, world: int) -> Iterator[Resolved]:
    """The resolved runs, all with ``world`` ranks. What the model or the batch does not allow is left out."""
    number = 0
    for pp, tp in product(divisors(world), divisors(world)):
        if world % (pp * tp):
            continue
        dp = world // (pp * tp)
        for zero, (schedule, chunks, group) in product(range(4) if dp > 1 else (0,), list(_schedules(pp))):
            found = None
            for microbatch in _microbatches(config.train.batch_sequences // dp, pp, number):
                plan = PlanConfig(
                    pp=pp,
                    dp=dp,
                    tp=tp,
                    zero=zero,
                    schedule=schedule,
                    chunks=chunks,
                    microbatch=microbatch,
                    microbatch_group=group,
                    recompute=RECOMPUTE[number % 3],
                    sequence_parallel=number % 4 != 3,
                    rules=_rules(config, number) if tp > 1 else config.plan.rules,
                )
                found = found or _resolved(config, plan, number, world)
            if found is not None:
                number += 1
                yield found


def _rules(config: RunConfig, number: int) -> tuple[tuple[str, Rule], ...]:
    """The run's own; of a decoder of ours, in turn with others over them."""
    own = dict(config.plan.rules)
    return tuple(sorted((own if config.model.source else own | dict(RULES[number // 2 % 4])).items()))


def _schedules(pp: int) -> Iterator[tuple[Schedule, int, int | None]]:
    yield "1f1b", 1, None
    yield "breadth-first", 2, None
    if pp > 1:
        yield "gpipe", 1, None
        yield "interleaved", 2, None
        yield "breadth-first", 2, pp
    else:
        yield "interleaved", 3, 2


def _microbatches(share: int, pp: int, number: int) -> list[int]:
    """Sizes to try: in turn one that fills the pipeline twice over and one that fills it once."""
    fits = [n for n in divisors(share) if (share // n) % pp == 0] if share else []
    wanted = pp if number % 2 else 2 * pp
    return sorted(fits, key=lambda size: abs(share // size - wanted))


def _resolved(config: RunConfig, plan: PlanConfig, number: int, world: int) -> Resolved | None:
    varied = replace(
        config,
        plan=plan,
        model=replace(config.model, tied=number % 2 == 0),
        data=replace(config.data, packed=number % 3 != 1),
    )
    try:
        return resolved(varied, world)
    except ConfigError:
        return None
