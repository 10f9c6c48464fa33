"""Every layout that fits a number of ranks, for ``prove --all``.

The mesh, the ZeRO stage and the schedule are crossed in full. What is independent of them (recompute, sequence
parallelism, rules that leave matrices whole, tied or untied head, packed or padded sequences, the size of a microbatch,
stages that are not even) is dealt out in turn, so that every value meets every axis without a product of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, Recompute, Rule, RunConfig
from superstep.plan.resolve import Resolved, divisors
from superstep.plan.shape import shape_of
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
        for zero, way in product(range(4) if dp > 1 else (0,), list(_schedules(pp))):
            found = None
            for microbatch in _microbatches(config.train.batch_sequences // dp, pp, number):
                plan = replace(
                    way,
                    pp=pp,
                    dp=dp,
                    tp=tp,
                    zero=zero,
                    microbatch=microbatch,
                    recompute=RECOMPUTE[number % 3],
                    sequence_parallel=number % 4 != 3,
                    rules=_rules(config, number) if tp > 1 else config.plan.rules,
                )
                found = found or _resolved(config, _uneven(config, plan) if number % 5 == 4 else plan, number, world)
            if found is not None:
                number += 1
                yield found


def _rules(config: RunConfig, number: int) -> tuple[tuple[str, Rule], ...]:
    """The run's own; of a decoder of ours in fast mode, in turn with others over them."""
    own = dict(config.plan.rules)
    is_varied = config.model.source is None and not config.numerics.exact
    return tuple(sorted((own | dict(RULES[number // 2 % 4]) if is_varied else own).items()))


def _schedules(pp: int) -> Iterator[PlanConfig]:
    yield PlanConfig(schedule="1f1b")
    yield PlanConfig(schedule="breadth-first", chunks=2)
    yield PlanConfig(schedule="zb-v", chunks=2)
    if pp > 1:
        yield PlanConfig(schedule="zb-h1")
        yield PlanConfig(schedule="gpipe")
        yield PlanConfig(schedule="interleaved", chunks=2)
        yield PlanConfig(schedule="breadth-first", chunks=2, microbatch_group=pp)
    else:
        yield PlanConfig(schedule="interleaved", chunks=3, microbatch_group=2)


def _uneven(config: RunConfig, plan: PlanConfig) -> PlanConfig:
    """The plan with as many units as can be on its first stage; of a decoder of ours."""
    if config.model.source is not None:
        return plan
    others = plan.pp * plan.chunks - 1
    units = shape_of(config.model).layers + 2
    return replace(plan, stages=(units - others, *[1] * others)) if units > others else plan


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
