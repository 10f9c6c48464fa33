"""A covering array of layouts: few of them, in which every pair of settings meets, and every three axes of the mesh.

Most faults need two settings at once (Kuhn 2004), so runs of all pairs find what runs of all products find, at a
fraction of their number. Layouts are drawn at random from all that resolve; of those the one is taken that has the most
new pairs for the processes it needs, until all pairs that any drawn layout has are met.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import small
from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, RunConfig
from superstep.plan.resolution.fill_plan import divisors
from superstep.plan.resolution.resolve import Resolved, resolve

SCHEDULES: tuple[tuple[str, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("breadth-first", 2),
    ("zb-h1", 1),
    ("zb-v", 2),
)
RULES = ((), (("ffn", "none"),), (("vocab", "none"),))
MESH = ("dp", "pp", "tp", "cp")

Setting = tuple[str, Hashable]


def settings(run: Resolved) -> dict[str, Hashable]:
    """What a fault could depend on. An axis is there or not; its length is met once, the full sweeps vary it."""
    plan, mesh, asked = run.plan, run.plan.mesh, run.config.plan
    return {
        **{axis: mesh.degree(axis) > 1 for axis in MESH},
        "schedule": plan.schedule,
        "zero": plan.zero,
        "replicas": mesh.replicas > 1,
        "recompute": plan.recompute,
        "sequence_parallel": plan.sequence_parallel,
        "context": plan.context if mesh.cp > 1 else None,
        "rules": asked.rules,
        "is_uneven": bool(asked.stages),
        "microbatch": plan.microbatch > 1,
        "tied": run.shape.tied,
        "packed": run.config.data.packed,
        "masked": run.config.data.is_masked,
    }


def meetings(run: Resolved) -> set[tuple[Setting, ...]]:
    """The pairs of settings that a run has, the axes that it has three of, and whether each of them is long."""
    found = sorted(settings(run).items(), key=str)
    long: list[tuple[Setting, ...]] = [((axis, min(run.plan.mesh.degree(axis), 4)),) for axis in MESH]
    return {*combinations(found, 2), *combinations([s for s in found if s[0] in MESH and s[1]], 3), *long}


def drawn(worlds: Sequence[int], count: int, seed: int) -> list[Resolved]:
    """Layouts that resolve, of ``count`` drawn for each world."""
    dice = random.Random(seed)
    return [run for world in worlds for _ in range(count) for run in _legal(_drawn(dice, world), world)]


def _drawn(dice: random.Random, world: int) -> RunConfig:
    left, degrees = world, {}
    for axis in dice.sample(MESH, len(MESH)):
        degrees[axis] = dice.choice(divisors(left))
        left //= degrees[axis]
    degrees["dp"] *= left
    schedule, chunks = dice.choice(SCHEDULES)
    plan = PlanConfig(
        **degrees,
        schedule=schedule,
        chunks=chunks,
        zero=dice.randrange(4),
        replicas=dice.choice([1, 2]),
        recompute=dice.choice(["none", "selective", "full"]),
        sequence_parallel=dice.choice([True, False]),
        context=dice.choice(["ring", "ulysses"]),
        rules=dice.choice(RULES),
        microbatch=dice.choice([1, 2]),
    )
    stages = plan.pp * chunks
    layers = max(3, stages + 1)
    if dice.choice([True, False]):
        plan = replace(plan, stages=(layers + 3 - stages, *[1] * (stages - 1)))
    return small.config(
        layers=layers,
        # Two microbatches for each data-parallel rank at least, and as many as there are pipeline ranks.
        sequences=max(2 * plan.dp, 8 if plan.dp > 1 or plan.pp > 2 else 4),
        tied=dice.choice([True, False]),
        packed=dice.choice([True, False]),
        masked=dice.choice([True, False]),
        **{name: getattr(plan, name) for name in PlanConfig.__slots__},
    )


def _legal(config: RunConfig, world: int) -> Iterator[Resolved]:
    try:
        yield resolve(config, world)
    except ConfigError:
        return


def covering(worlds: Sequence[int], *, count: int = 400, seed: int = 0) -> dict[int, list[Resolved]]:
    """For each number of ranks the layouts to run, together a covering array of what was drawn."""
    runs = drawn(worlds, count, seed)
    met = [meetings(run) for run in runs]
    missing = set().union(*met)
    chosen: dict[int, list[Resolved]] = {world: [] for world in worlds}
    while missing:
        at = max(range(len(runs)), key=lambda k: len(met[k] & missing) / runs[k].plan.mesh.world ** 0.5)
        missing -= met[at]
        chosen[runs[at].plan.mesh.world].append(runs[at])
    return chosen
