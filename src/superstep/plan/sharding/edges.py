"""Edges between units: which values a unit takes, and which pass between two stages.

Value ``v`` is what unit ``v - 1`` returns: in a chain, the input of unit ``v``. A value that a later stage takes goes
through the stages between, from each to the next, and its gradient the same way back: every stage adds the gradients of
its own readers. So the sum has one order, from the last reader to the first, on every layout.

    units    a  b  c | d  e | f        value 1 (what a returns) is taken by b and f
    passes           3 1    5 1        between the stages: value 3 and 1, then 5 and 1
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from superstep.errors import ConfigError

Values = tuple[int, ...]


def list_taken_values(units: int, inputs: Sequence[Sequence[int]]) -> tuple[Values, ...]:
    """The values that each unit takes, in the order of its arguments; those that are not needed take none.

    Args:
        units: their number.
        inputs: for each unit, the units whose outputs it takes; empty for a chain.
    """
    if not inputs:
        return ((), *((unit,) for unit in range(1, units)))[:units]
    needed = list_needed_units(inputs)
    return tuple(tuple(unit + 1 for unit in before) if unit in needed else () for unit, before in enumerate(inputs))


def list_needed_units(inputs: Sequence[Sequence[int]]) -> frozenset[int]:
    """The units on which the output of the last one depends, itself too.

    Args:
        inputs: for each unit, the units whose outputs it takes.
    """
    needed = {len(inputs) - 1}
    for unit in reversed(range(len(inputs))):
        if unit in needed:
            needed.update(inputs[unit])
    return frozenset(needed)


def list_passing_values(stages: Sequence[Values], taken: Sequence[Values]) -> tuple[Values, ...]:
    """The values that enter each stage from the stage before, the newest first.

    The result has one entry more than there are stages, the last of them empty, so that entry ``stage + 1`` always has
    what leaves a stage.
    """
    stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
    last_reader = {value: stage_of[unit] for unit, values in enumerate(taken) for value in values}
    entering: list[list[int]] = [[] for _ in range(len(stages) + 1)]
    for value in sorted(last_reader, reverse=True):
        for stage in range(stage_of[value - 1] + 1, last_reader[value] + 1):
            entering[stage].append(value)
    return tuple(map(tuple, entering))


def list_backward_units(taken: Sequence[Values], trained: Sequence[bool]) -> tuple[bool, ...]:
    """Whether each unit has a backward pass: it is trained itself, or takes what a unit with one returns.

    Args:
        taken: the values that each unit takes.
        trained: whether each unit reads trained parameters.
    """
    has_backward: list[bool] = []
    for is_trained, values in zip(trained, taken, strict=True):
        has_backward.append(is_trained or any(has_backward[value - 1] for value in values))
    return tuple(has_backward)


def require_way_back(
    names: Sequence[str], stages: Sequence[Values], taken: Sequence[Values], has_backward: Sequence[bool]
) -> None:
    """Refuse a stage without a backward pass that a gradient would have to pass.

    Raises:
        ConfigError: naming the unit of the gradient, and those of the stage.
    """
    passing = list_passing_values(stages, taken)
    for stage, units in enumerate(stages):
        through = [value for value in passing[stage] if value in passing[stage + 1] and has_backward[value - 1]]
        if through and not any(has_backward[unit] for unit in units):
            raise ConfigError(
                f"the gradient of unit '{names[through[0] - 1]}' would pass the stage of unit '{names[units[0]]}', in "
                "which and before which nothing is trained; set plan.stages so that the stage has a trained unit, or "
                "plan.pp to 1."
            )


def require_work(names: Sequence[str], stages: Sequence[Values], needed: Collection[int], phase: str) -> None:
    """Refuse a stage of which a phase needs no unit: it would pass nothing on.

    Raises:
        ConfigError: naming the phase and a unit of the stage.
    """
    for units in stages:
        if not set(units) & set(needed):
            raise ConfigError(
                f"phase '{phase}' computes no unit of the stage of unit '{names[units[0]]}'; set plan.stages so that "
                "each stage has a unit that leads to the phase's loss, or plan.pp to 1."
            )


def require_no_return(
    names: Sequence[str], stages: Sequence[Values], placement: Sequence[int], taken: Sequence[Values]
) -> None:
    """Refuse a value that leaves a pipeline rank and comes back to it: the rank would hold two values of one number.

    Raises:
        ConfigError: naming the unit that returns it.
    """
    ranks: dict[int, list[int]] = {}
    for stage, values in enumerate(list_passing_values(stages, taken)[:-1]):
        for value in values:
            before = ranks.setdefault(value, [placement[stage - 1]])
            if placement[stage] == before[-1]:
                continue
            if placement[stage] in before:
                raise ConfigError(
                    f"what unit '{names[value - 1]}' returns would come to pipeline rank {placement[stage]} twice, "
                    "because plan.schedule or plan.chunks gives a rank several stages; set plan.schedule to '1f1b', or "
                    "plan.stages so that the units that take it are in the next stage."
                )
            before.append(placement[stage])
