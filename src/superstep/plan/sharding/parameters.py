"""Whether a model's parameters can be cut as the rules say, before any rank is launched.

The engine can cut a linear layer over its output or its input, and an embedding over its rows. Within a unit, what is
cut over an output must be joined again by a layer that is cut over its input; the last unit's output may stay cut, as
the loss is computed over a cut vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.block_weights import BLOCK
from superstep.plan.config import PlanConfig, RunConfig
from superstep.plan.model.outline import Outline, Parameter, Unit
from superstep.plan.model.shape import ModelShape
from superstep.plan.rules import DEFAULT, Rules
from superstep.plan.sharding.padding import pad_vocab

ALIKE = ("heads", "kv_heads")
"""Axes that attention reads together: each rank has the key and value heads of its query heads."""


def rules_of(outline: Outline, plan: PlanConfig) -> Rules:
    """The rules of a plan, each possible on some number of ranks. Raises ConfigError where a rule names an axis that no
    parameter has, or cuts what cannot be cut.
    """
    rules = DEFAULT.over(plan.rules)
    parameters = [p for unit in outline.units for p in unit.parameters]
    _check_axes(parameters, plan)
    for parameter in parameters:
        _check_parameter(parameter, rules, plan)
    _check_alike(parameters, rules)
    return rules


def padding_of(shape: ModelShape | None, rules: Rules, parts: int) -> tuple[tuple[str, int], ...]:
    """For each axis that is padded to split into ``parts``, its rows over all of them: our decoder's vocabulary, with a
    loss that ignores the added rows.
    """
    if shape is None or rules.cut("vocab") is None or shape.vocab % parts == 0:
        return ()
    return (("vocab", pad_vocab(shape.vocab, parts)),)


def check_split(outline: Outline, rules: Rules, tp: int, padded: Collection[str] = ()) -> None:
    """Check that the rules work on ``tp`` ranks; axes that are ``padded`` do. Raises ConfigError where a dim does not
    split, nothing is cut, or a cut output is not joined again.
    """
    if tp == 1:
        return
    for unit in outline.units:
        for parameter in unit.parameters:
            _check_size(parameter, rules, tp, padded)
    _check_regions(outline.units, rules, tp)


def check_blocks(outline: Outline, rules: Rules, tp: int) -> None:
    """Check that blocks of few bits divide the inputs of their linears, on each tensor-parallel rank. Raises
    ConfigError.
    """
    for parameter in (p for unit in outline.units for p in unit.parameters if p.block_format):
        inputs, linear = parameter.dims[1], parameter.name.removesuffix(".weight")
        if inputs % BLOCK:
            raise ConfigError(
                f"lora.base = '{parameter.block_format}': {linear} has {inputs} inputs, which blocks of {BLOCK} do not "
                f"divide; leave lora.base out, or choose a model with widths that are multiples of {BLOCK}."
            )
        if rules.cut(parameter.axes[1]) == "tp" and inputs // BLOCK % tp:
            raise ConfigError(
                f"plan.tp = {tp} with lora.base = '{parameter.block_format}': {linear} has {inputs} inputs, "
                f"{inputs // BLOCK} blocks of {BLOCK}, which do not split evenly over {tp} ranks; set plan.tp to "
                f"{math.gcd(inputs // BLOCK, tp)}, or leave lora.base out."
            )


def has_cut_output(outline: Outline, rules: Rules) -> bool:
    """Whether the last unit's output is cut over tp, and the loss with it."""
    columns, rows = _cut_products(outline.units[-1], rules)
    return bool(columns) and not rows


def columns_of(outline: Outline, rules: Rules) -> int:
    """Columns of the last unit's output over all ranks where it is cut; else 0."""
    columns, rows = _cut_products(outline.units[-1], rules)
    return columns[0][0].dims[0] if columns and not rows else 0


def _check_axes(parameters: Sequence[Parameter], plan: PlanConfig) -> None:
    known = sorted({axis for p in parameters for axis in p.axes if axis is not None})
    for axis, rule in plan.rules:
        if axis not in known:
            raise ConfigError(
                f"plan.rules.{axis} = '{rule}': no parameter of the model has an axis '{axis}'"
                + (did_you_mean(axis, known) if known else ", nor any other; leave plan.rules out.")
            )
        if (rule == "ep") != (axis == "experts"):
            other = "'ep'" if axis == "experts" else "'tp' or 'none'"
            raise ConfigError(
                f"plan.rules.{axis} = '{rule}': experts alone are cut over ep, and over nothing else; "
                f"set plan.rules.{axis} to {other}."
            )


def _check_parameter(parameter: Parameter, rules: Rules, plan: PlanConfig) -> None:
    cut = [(dim, axis) for dim, axis in enumerate(parameter.axes) if axis and rules.cut(axis) == "tp"]
    if not cut:
        return
    if len(cut) > 1:
        (one, first), (two, second) = cut[:2]
        axis = second if dict(DEFAULT.cuts).get(second) != "tp" or dict(plan.rules).get(first) != "tp" else first
        raise ConfigError(
            f"{parameter.name}: plan.rules.{first} = 'tp' cuts its dim {one}, plan.rules.{second} = 'tp' its dim "
            f"{two}, and one dim of a parameter can be cut; set plan.rules.{axis} to 'none'."
        )
    dim, axis = cut[0]
    if not parameter.is_plain and parameter.layer != "other" and (plan.tp > 1 or axis in dict(plan.rules)):
        raise ConfigError(
            f"{parameter.name}: plan.rules.{axis} = 'tp' cuts its dim {dim} ('{axis}', {parameter.dims[dim]}), and its "
            f"{parameter.layer} layer has a forward, hooks or options of its own, which want the whole of it; "
            f"set plan.rules.{axis} to 'none'."
        )
    if parameter.layer == "convolution":
        _check_convolution(parameter, dim, plan)
    if parameter.layer == "other" or (parameter.layer == "embedding" and dim > 0):
        raise ConfigError(
            f"{parameter.name}: plan.rules.{axis} = 'tp' cuts its dim {dim} ('{axis}', {parameter.dims[dim]}), and "
            "only linear layers, convolutions and the rows of embeddings can be cut over tp; "
            f"set plan.rules.{axis} to 'none'."
        )


def _check_convolution(parameter: Parameter, dim: int, plan: PlanConfig) -> None:
    axis, size = parameter.axes[dim], parameter.dims[dim]
    at = f"{parameter.name}: plan.rules.{axis} = 'tp' cuts its dim {dim} ('{axis}', {size}), and"
    if dim > 1 or (dim == 1 and parameter.groups > 1):
        where = "over its output or, without groups, its input"
        raise ConfigError(f"{at} a convolution can be cut {where}; set plan.rules.{axis} to 'none'.")
    if plan.tp > 1 and plan.sequence_parallel:
        raise ConfigError(
            f"{at} plan.sequence_parallel = true splits the places that a convolution reads; set "
            "plan.sequence_parallel to false."
        )


def _check_alike(parameters: Sequence[Parameter], rules: Rules) -> None:
    first, second = ALIKE
    of = {axis: p for p in reversed(parameters) for axis in p.axes if axis in ALIKE}
    if len(of) == len(ALIKE) and rules.cut(first) != rules.cut(second):
        whole, cut = (first, second) if rules.cut(second) else (second, first)
        raise ConfigError(
            f"{of[whole].name}: plan.rules.{whole} = 'none' leaves its dim '{whole}' whole, and plan.rules.{cut} = "
            f"'tp' cuts '{cut}', which attention reads with it; set plan.rules.{whole} to 'tp', or both to 'none'."
        )


def _check_size(parameter: Parameter, rules: Rules, tp: int, padded: Collection[str]) -> None:
    for dim, (size, axis) in enumerate(zip(parameter.dims, parameter.axes, strict=True)):
        if rules.cut(axis) == "tp" and parameter.groups % tp and parameter.groups > 1:
            raise ConfigError(
                f"{parameter.name}: its {parameter.groups} groups do not split over plan.tp = {tp}, which "
                f"plan.rules.{axis} = 'tp' asks for; set plan.rules.{axis} to 'none', or plan.tp to one of "
                f"{_divisors(parameter.groups)}."
            )
        if rules.cut(axis) == "tp" and axis not in padded and size % tp:
            raise ConfigError(
                f"{parameter.name}: its dim {dim} ('{axis}') of {size} does not split over plan.tp = {tp}, which "
                f"plan.rules.{axis} = 'tp' asks for; set plan.rules.{axis} to 'none', or plan.tp to one of "
                f"{_divisors(size)}."
            )


def _check_regions(units: Sequence[Unit], rules: Rules, tp: int) -> None:
    if not any(rules.cuts_any(p.axes) for unit in units for p in unit.parameters):
        raise ConfigError(
            f"plan.tp = {tp} needs something to cut, and no parameter of the model has an axis with a rule 'tp'; "
            "set plan.tp to 1, or name an axis in plan.rules."
        )
    for unit in units:
        columns, rows = _cut_products(unit, rules)
        # The last unit's own logits may stay cut.
        open_end = columns and not rows and not (unit is units[-1] and columns[-1][0].layer == "linear")
        if open_end or (rows and not columns):
            (parameter, axis), what = (columns[0], "output") if open_end else (rows[0], "input")
            raise ConfigError(
                f"{parameter.name}: plan.rules.{axis} = 'tp' cuts its {what}, and no linear layer or convolution of "
                f"unit '{unit.name}' is cut over its {'input' if open_end else 'output'} to match; set "
                f"plan.rules.{axis} to 'none', or give such a layer the axis."
            )


def _cut_products(
    unit: Unit, rules: Rules
) -> tuple[list[tuple[Parameter, str | None]], list[tuple[Parameter, str | None]]]:
    """The unit's linears and convolutions cut over their output, and those cut over their input, each by its weight and
    the cut axis.
    """

    def cut(dim: int) -> Iterator[tuple[Parameter, str | None]]:
        for p in unit.parameters:
            is_weight = len(p.axes) == 2 if p.layer == "linear" else p.layer == "convolution" and len(p.axes) > 2
            if is_weight and rules.cut(p.axes[dim]) == "tp":
                yield p, p.axes[dim]

    return list(cut(0)), list(cut(1))


def check_decoder(config: RunConfig, shape: ModelShape, rules: Rules) -> None:
    """Further limits of our decoder's axes: whole heads, and a whole sequence. Raises ConfigError: heads or tokens do
    not split over tp, or attention would see a part of the sequence.
    """
    plan = config.plan
    if plan.tp == 1:
        return
    cut = ("heads", "kv_heads") if shape.moe else ("heads", "kv_heads", "ffn")
    sizes = {f"model.{axis}": getattr(shape, axis) for axis in cut if rules.cut(axis) == "tp"}
    if shape.delta is not None and rules.cut("heads") == "tp":
        sizes["linear_num_key_heads"] = shape.delta.key_heads
    # In a mixture of experts it is the tokens that tp splits, with sequence parallelism or without.
    if plan.sequence_parallel or shape.moe:
        sizes["data.sequence_tokens"] = config.data.sequence_tokens
    if plan.sequence_parallel and rules.cut("heads") is None:
        raise ConfigError(
            "plan.rules.heads = 'none' leaves attention whole, and plan.sequence_parallel = true splits the "
            "sequence that it reads; set plan.sequence_parallel to false."
        )
    for name, size in sizes.items():
        if size % plan.tp:
            axis = name.partition(".")[2]
            instead = f", or plan.rules.{axis} to 'none'" if axis == "ffn" else ""
            raise ConfigError(
                f"{name} = {size} does not split over plan.tp = {plan.tp}; set plan.tp to one of "
                f"{_divisors(math.gcd(*sizes.values()))}{instead}."
            )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
