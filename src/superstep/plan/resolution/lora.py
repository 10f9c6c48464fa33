"""LoRA: which linears get adapters, and what these add to a model's outline (Hu 2021).

    y = W x + scale · B (A x)       scale = alpha / R
    R  rank      I  inputs of the linear      O  its outputs

A is [R, I] and B is [O, R]. Each has the linear's axis in the dim that they share, so that the rules cut them together:
for a linear cut over its output B is cut, for one cut over its input A; the other factor is whole on every rank.
Targets are named as in PEFT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.config import LoraConfig
from superstep.plan.model.outline import Factor, Outline, Parameter
from superstep.plan.resolution.freeze import freeze_all

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
ENDS: dict[Factor, str] = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
"""Ends of the factors' names. The linear's name stands between PREFIX and it, as in PEFT's files."""


def is_named(ends: Sequence[str], linear: str) -> bool:
    """Whether one of ``ends`` is a linear's name, or its end after a dot."""
    return any(linear == end or linear.endswith(f".{end}") for end in ends)


def factor_names(linear: str) -> dict[Factor, str]:
    return {factor: f"{PREFIX}{linear}{end}" for factor, end in ENDS.items()}


def takes_adapters(outline: Outline) -> tuple[str, ...]:
    """The linears that may have adapters, by name: plain ones of all units but the last, and not shared by two units.
    In our decoder these are the blocks' linears; PEFT leaves the head out, too.
    """
    units = outline.units[:-1] if len(outline.units) > 1 else outline.units
    readers = Counter(p.name for unit in outline.units for p in unit.parameters)
    return tuple(
        p.name.removesuffix(".weight")
        for unit in units
        for p in unit.parameters
        if p.layer == "linear" and len(p.dims) == 2 and p.is_plain and p.name.endswith(".weight")
        if p.factor is None and readers[p.name] == 1
    )


def targets_of(outline: Outline, lora: LoraConfig) -> tuple[str, ...]:
    """The linears that get adapters, by name, in model order. Raises ConfigError where a field is out of range, or a
    target is no linear of the model.
    """
    _check(lora)
    linears = takes_adapters(outline)
    ends = sorted({name.rpartition(".")[2] for name in linears})
    if not linears:
        raise ConfigError("lora: the model has no plain linear layer before its last unit; leave [lora] out.")
    for target in lora.targets:
        if target != ALL_LINEAR and not any(is_named((target,), name) for name in linears):
            raise ConfigError(
                f"lora.targets: '{target}' is not a linear layer that can have "
                f"adapters{did_you_mean(target, [*ends, ALL_LINEAR])}"
            )
    return linears if ALL_LINEAR in lora.targets else tuple(name for name in linears if is_named(lora.targets, name))


def _check(lora: LoraConfig) -> None:
    if lora.rank < 1:
        raise ConfigError(f"lora.rank = {lora.rank} must be at least 1.")
    if not 0 < lora.alpha < math.inf:
        raise ConfigError(f"lora.alpha = {lora.alpha:g} must be above 0 and finite.")
    if not 0 <= lora.dropout < 1:
        raise ConfigError(f"lora.dropout = {lora.dropout:g} must be at least 0 and below 1.")
    if not lora.targets:
        raise ConfigError(f"lora.targets is empty; name linear layers such as q_proj, or {ALL_LINEAR}.")


def add_lora(outline: Outline, lora: LoraConfig) -> Outline:
    """The outline with the factors after each unit's own parameters, which are frozen; all linears that may have
    adapters are in ``lora.base``. Raises ConfigError like ``targets_of``.
    """
    targets = set(targets_of(outline, lora))
    packed = set(takes_adapters(outline)) if lora.base else set()
    own = freeze_all(outline)
    units = [
        replace(
            unit,
            parameters=(
                *(_pack(p, packed, lora) for p in unit.parameters),
                *_factors(unit.parameters, targets, lora.rank),
            ),
        )
        for unit in own.units
    ]
    return Outline(tuple(units))


def _pack(parameter: Parameter, packed: set[str], lora: LoraConfig) -> Parameter:
    linear = parameter.name.removesuffix(".weight")
    if linear == parameter.name or linear not in packed:
        return parameter
    return replace(parameter, block_format=lora.base)


def _factors(parameters: Sequence[Parameter], targets: set[str], rank: int) -> Iterator[Parameter]:
    for parameter in parameters:
        linear = parameter.name.removesuffix(".weight")
        if linear not in targets or linear == parameter.name:
            continue
        (outputs, inputs), (out_axis, in_axis) = parameter.dims, parameter.axes
        names = factor_names(linear)
        yield Parameter(name=names["a"], axes=(None, in_axis), dims=(rank, inputs), layer="linear", factor="a")
        yield Parameter(
            name=names["b"],
            axes=(out_axis, None),
            dims=(outputs, rank),
            layer="linear",
            factor="b",
            sections=parameter.sections,
        )
