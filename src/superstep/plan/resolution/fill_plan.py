"""Automatic values of ``[plan]``: schedule, degrees, microbatches and places of activations."""

from __future__ import annotations

from dataclasses import replace

from superstep.errors import ConfigError
from superstep.plan.config import LOOPED, ZERO_BUBBLE, Place, PlanConfig, RunConfig, Schedule, setting_text
from superstep.plan.model.outline import Outline
from superstep.plan.resolution.budget import KeptChoices, find_kept, find_place
from superstep.plan.sharding.encoder import check_encoder, count_in_front


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def fill_plan(config: RunConfig, outline: Outline, world: int | None, *, is_ours: bool) -> PlanConfig:
    """The plan's section with values in place of None.

    Args:
        config: the whole config.
        outline: of the model.
        world: the number of ranks that are already launched; None where the plan decides.
        is_ours: whether the model is our decoder, and no user's.

    Raises:
        ConfigError: no value works, or one that is set does not.
    """
    plan = config.plan
    plan = replace(plan, dp=_data_parallel(plan, world))
    blocks = len(outline.units) - 2 - count_in_front(outline, plan)
    plan = replace(plan, schedule=_schedule(plan, blocks, is_compiled=config.numerics.compile))
    check_encoder(outline, plan)
    stages = plan.pp * plan.chunks
    if 1 < stages > blocks:
        # Where even one rank cannot have so many chunks, it is the chunks that must come down.
        field, other = ("pp", plan.chunks) if plan.chunks <= max(blocks, 1) else ("chunks", min(plan.pp, blocks))
        has = f"model.layers = {blocks}"
        if not is_ours:
            has = f"the model has {blocks} unit{'' if blocks == 1 else 's'} between its first and its last"
        raise ConfigError(
            f"plan.pp · plan.chunks = {stages} stages need at least as many blocks, and {has}; set plan.{field} to one "
            f"of {list(range(1, max(blocks // max(other, 1), 1) + 1))}."
        )
    plan = replace(plan, microbatch=_microbatch(plan, config.train.batch_sequences))
    return replace(plan, microbatch_group=_group(plan, config.train.batch_sequences))


def _schedule(plan: PlanConfig, layers: int, *, is_compiled: bool) -> Schedule:
    schedule = plan.schedule or ("interleaved" if plan.chunks > 1 else "1f1b")
    if plan.chunks > 1 and schedule not in (*LOOPED, "zb-v"):
        raise ConfigError(
            f"plan.schedule = '{schedule}' runs one stage on a rank, and plan.chunks = {plan.chunks}; set plan.chunks "
            "to 1, or plan.schedule to 'interleaved' or 'breadth-first'."
        )
    if schedule == "zb-v" and (plan.chunks != 2 or layers < 2):
        raise ConfigError(
            f"plan.schedule = 'zb-v' runs two stages of a block or more on a rank, and plan.chunks = {plan.chunks}, "
            f"model.layers = {layers}; set {'plan.chunks' if plan.chunks != 2 else 'model.layers'} to 2, or "
            "choose another plan.schedule."
        )
    if is_compiled and schedule in ZERO_BUBBLE:
        raise ConfigError(
            f"plan.schedule = '{schedule}' takes the backward pass in two, and a compiled block (numerics.compile = "
            "true) has it in one; set numerics.compile to false, or plan.schedule to "
            f"'{'1f1b' if plan.chunks == 1 else 'interleaved'}'."
        )
    return schedule


def _data_parallel(plan: PlanConfig, world: int | None) -> int:
    others = plan.pp * plan.cp * plan.tp
    if plan.dp is None:
        if world is not None and world % others:
            raise ConfigError(
                f"plan.pp · plan.cp · plan.tp = {others} does not divide the {world} launched ranks; choose a product "
                f"among {divisors(world)}."
            )
        return 1 if world is None else world // others
    if world is not None and others * plan.dp != world:
        raise ConfigError(
            f"plan.pp · plan.dp · plan.cp · plan.tp = {others * plan.dp} ranks, and {world} are launched; "
            "leave plan.dp out, or launch as many ranks as the plan has."
        )
    return plan.dp


def _microbatch(plan: PlanConfig, batch: int) -> int:
    assert plan.dp is not None
    if batch % plan.dp:
        raise ConfigError(
            f"{setting_text('train.batch_sequences', batch)} does not split over plan.dp = {plan.dp}; set plan.dp to "
            f"one of {divisors(batch)}, or train.batch_sequences to a multiple of {plan.dp}."
        )
    share = batch // plan.dp
    if plan.microbatch is not None:
        if share % plan.microbatch:
            raise ConfigError(
                f"plan.microbatch = {plan.microbatch} does not divide the {share} sequences of a "
                f"data-parallel rank; set plan.microbatch to one of {divisors(share)}."
            )
        return plan.microbatch
    wanted = 2 * plan.pp if plan.pp > 1 else 1
    fits = [n for n in divisors(share) if share // n >= wanted and (share // n) % plan.pp == 0]
    return fits[-1] if fits else 1


def _group(plan: PlanConfig, batch: int) -> int | None:
    assert plan.dp is not None
    assert plan.microbatch is not None
    m = batch // (plan.dp * plan.microbatch)
    if plan.schedule not in LOOPED:
        if plan.microbatch_group is not None:
            raise ConfigError(
                f"plan.microbatch_group = {plan.microbatch_group} has no meaning for plan.schedule = "
                f"'{plan.schedule}'; leave it out, or choose 'interleaved' or 'breadth-first'."
            )
        return None
    least = plan.pp if plan.chunks > 1 else 1
    choices = [n for n in divisors(m) if n >= least]
    if not choices:
        raise ConfigError(
            f"plan.pp = {plan.pp} with plan.chunks = {plan.chunks} needs at least as many microbatches, and there are "
            f"{m}; set train.batch_sequences to a multiple of {plan.dp * plan.microbatch * plan.pp}, or lower "
            "plan.microbatch or plan.pp."
        )
    if plan.microbatch_group is None:
        # Interleaving keeps the fewest activations with the smallest group; breadth-first is one group.
        return choices[0] if plan.schedule == "interleaved" else m
    if plan.microbatch_group not in choices:
        raise ConfigError(
            f"plan.microbatch_group = {plan.microbatch_group} must divide the {m} microbatches and be at "
            f"least {least}; set plan.microbatch_group to one of {choices}."
        )
    return plan.microbatch_group


def find_activations(config: RunConfig, outline: Outline, microbatches: int) -> tuple[KeptChoices, tuple[Place, ...]]:
    """What each unit keeps of each microbatch, where it is chosen, and the place of each unit's kept activations.

    Raises:
        ConfigError: as ``find_kept``, and for places.
    """
    kept = find_kept(config, outline, microbatches)
    return kept, _find_places(config.plan, outline, kept)


def _find_places(plan: PlanConfig, outline: Outline, kept: KeptChoices) -> tuple[Place, ...]:
    """The place of each unit's kept activations; () where all stay on the device. With choices that of the units of
    which any microbatch moves. Raises ConfigError: a list of another
    length, or a place that is the device's own memory.
    """
    places, units = plan.activations or ("device",), len(outline.units)
    if len(places) not in (1, units):
        raise ConfigError(
            f"plan.activations = {list(places)} has {len(places)} places and the model {units} units; give one place, "
            f"or a list of {units}: of {outline.names[0]}, each unit after it, and {outline.names[-1]}."
        )
    if "host" in places and plan.device == "cpu":
        raise ConfigError(host_error())
    if plan.recompute == "auto":
        place = find_place(plan)
        places = tuple(place if place in own else "device" for own in kept)
    if set(places) <= {"device"}:
        return ()
    return places * units if len(places) == 1 else places


def host_error() -> str:
    """Why ranks on a CPU cannot move activations to the host."""
    return (
        "plan.activations = 'host' on CPU ranks: the host's memory is where they compute; set plan.activations to "
        "'disk', or plan.device to 'cuda'."
    )
