"""Every layout of a number of ranks, for ``prove --all``.

All degrees of the mesh are combined, and each mesh with each of its schedules and ZeRO stages. Independent settings
(recompute, sequence parallelism, ring or Ulysses, replicas, uneven stages, rules that leave matrices whole, tied or
untied head, packed or padded sequences, the microbatch size) rotate, so that every value meets every axis without a
product of all. With ``plan.recompute`` = auto what units keep rotates over them and the microbatches, so that every
choice meets every schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from superstep.errors import ConfigError
from superstep.plan.config import Context, PlanConfig, Recompute, Rule, RunConfig
from superstep.plan.mesh import MeshShape
from superstep.plan.model.axes import outline_of
from superstep.plan.model.multimodal.families import find_family, has_own_units
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.budget import find_place, list_choices, write_kept
from superstep.plan.resolution.fill_plan import divisors
from superstep.plan.resolution.resolve import Resolved
from superstep.train.weights.model import resolve_config

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
CONTEXT: tuple[Context, ...] = ("ring", "ulysses")
RULES: tuple[tuple[tuple[str, Rule], ...], ...] = ((), (("ffn", "none"),), (), (("vocab", "none"),))


def layouts(config: RunConfig, world: int) -> Iterator[Resolved]:
    """Resolved runs with ``world`` ranks. Layouts that the model or the batch does not allow are left out.

    In exact mode all have the microbatch of ``config.plan``, or one sequence: bits depend on it.
    """
    number = 0
    for mesh in _meshes(world):
        for way in (*_ways(mesh), *_list_encoder_ways(config, mesh)):
            run = _first(config, _dealt(config, way, mesh, number), mesh, number, world)
            if run is not None:
                number += 1
                yield run


def _meshes(world: int) -> Iterator[MeshShape]:
    for pp, cp, tp in product(divisors(world), repeat=3):
        if world % (pp * cp * tp) == 0:
            yield MeshShape(pp=pp, dp=world // (pp * cp * tp), cp=cp, tp=tp)


def _ways(mesh: MeshShape) -> Iterator[PlanConfig]:
    """Pairs of schedule and ZeRO stage, as many as it takes to use each once."""
    schedules = list(_schedules(mesh.pp))
    zeros = range(4) if mesh.data > 1 else range(1)
    for at in range(max(len(schedules), len(zeros))):
        # Rotate by one more step each time, so that pairs differ between meshes.
        turn = mesh.pp + mesh.cp + mesh.tp
        yield replace(schedules[at % len(schedules)], zero=zeros[(at + turn + at // len(zeros)) % len(zeros)])


def _list_encoder_ways(config: RunConfig, mesh: MeshShape) -> Iterator[PlanConfig]:
    """An encoder on every pipeline rank; models without one are refused."""
    if mesh.pp > 1 and has_own_units(config.model):
        yield PlanConfig(schedule="1f1b", encoder="spread", zero=2 if mesh.dp > 1 else 0)
        yield PlanConfig(schedule="zb-h1", encoder="bubbles", zero=3 if mesh.dp > 1 else 0)


def _rules(config: RunConfig, number: int) -> tuple[tuple[str, Rule], ...]:
    """The run's own rules; for our decoder in fast mode, further rules in turn."""
    own = dict(config.plan.rules)
    if has_own_units(config.model) or config.numerics.exact:
        return config.plan.rules
    # A mixture has no feed-forward to cut.
    others = dict(RULES[number // 2 % 4]) if shape_of(config.model).moe is None else dict(RULES[number // 2 % 2 * 3])
    return tuple(sorted((own | others).items()))


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


def _dealt(config: RunConfig, way: PlanConfig, mesh: MeshShape, number: int) -> PlanConfig:
    """The rotating settings of one layout."""
    can_replicate = mesh.data % 4 == 0 or (mesh.data > 2 and mesh.data % 2 == 0)
    plan = replace(
        way,
        pp=mesh.pp,
        dp=mesh.dp,
        cp=mesh.cp,
        tp=mesh.tp,
        recompute="auto" if config.plan.recompute == "auto" else RECOMPUTE[number % 3],
        memory=config.plan.memory,
        sequence_parallel=number % 4 != 3 and config.data.source is None,
        context=CONTEXT[number // 2 % 2] if mesh.cp > 1 else "ring",
        replicas=2 if can_replicate and way.zero and number % 2 else 1,
        ep=_experts(config, mesh, number),
        rules=_rules(config, number) if mesh.tp > 1 else config.plan.rules,
        activations=config.plan.activations,
        reload_ahead=config.plan.reload_ahead,
    )
    return _uneven(config, plan) if number % 5 == 4 else plan


def _experts(config: RunConfig, mesh: MeshShape, number: int) -> int:
    """In turn, every number of ranks that can share the experts."""
    moe = None if has_own_units(config.model) else shape_of(config.model).moe
    choices = [n for n in divisors(mesh.world // mesh.pp) if moe is not None and moe.experts % n == 0] or [1]
    return choices[number % len(choices)]


def _uneven(config: RunConfig, plan: PlanConfig) -> PlanConfig:
    """A plan of our decoder with as many units as possible on its first stage."""
    if has_own_units(config.model):
        return plan
    others = plan.pp * plan.chunks - 1
    units = len(outline_of(shape_of(config.model)).units)
    return replace(plan, stages=(units - others, *[1] * others)) if units > others else plan


def _first(config: RunConfig, plan: PlanConfig, mesh: MeshShape, number: int, world: int) -> Resolved | None:
    """The layout with the first valid microbatch size; with a ring if heads are too few for Ulysses, and without expert
    parallelism if that does not go with replicas.
    """
    tries: tuple[tuple[Context, int], ...] = ((plan.context, plan.ep), ("ring", plan.ep), ("ring", 1))
    for context, ep in dict.fromkeys(tries):
        for microbatch in _microbatches(config, mesh, number):
            run = _resolve_layout(config, replace(plan, context=context, ep=ep, microbatch=microbatch), number, world)
            if run is not None:
                return run
    return None


def _microbatches(config: RunConfig, mesh: MeshShape, number: int) -> list[int]:
    """Sizes to try: in turn one that fills the pipeline twice, and one that fills it once."""
    if config.numerics.exact:
        return [config.plan.microbatch or 1]
    share = config.train.batch_sequences // mesh.dp
    fits = [n for n in divisors(share) if (share // n) % mesh.pp == 0] if share else []
    wanted = mesh.pp if number % 2 else 2 * mesh.pp
    return sorted(fits, key=lambda size: abs(share // size - wanted))


def _deal_kept(config: RunConfig, plan: PlanConfig, number: int) -> tuple[str, ...]:
    """Every choice in turn, for each unit and microbatch."""
    outline = outline_of(shape_of(config.model))
    assert plan.dp is not None
    assert plan.microbatch is not None
    microbatches = config.train.batch_sequences // (plan.dp * plan.microbatch)
    place = find_place(plan)
    choices = [list_choices(place, can_recompute=can_recompute) for can_recompute in outline.recomputed]
    return write_kept(
        tuple(
            tuple(known[(unit + m + number) % len(known)] for m in range(microbatches))
            for unit, known in enumerate(choices)
        )
    )


def _resolve_layout(config: RunConfig, plan: PlanConfig, number: int, world: int) -> Resolved | None:
    has_samples, model = config.data.source is not None, config.model
    if plan.recompute == "auto" and not has_own_units(model):
        plan = replace(plan, kept=_deal_kept(config, plan, number))
    varied = replace(
        config,
        plan=plan,
        model=model if find_family(model) is not None else replace(model, tied=number % 2 == 0),
        data=config.data if has_samples else replace(config.data, packed=number % 3 != 1),
    )
    try:
        return resolve_config(varied, world)
    except ConfigError:
        return None
