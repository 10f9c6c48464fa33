"""The decoder's units: its modules, and for each parameter its axes from ``plan.model.axes`` and its initial values.

The plan's rules map logical axes to mesh axes (``heads -> tp``), as GSPMD does by annotation (Xu 2021); the model
itself has no such knowledge.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from superstep.model.decoder import Block, Embedding, Head
from superstep.model.mtp import FurtherToken
from superstep.model.rope import Rope, layer_ropes
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.model.axes import (
    CHOICE_AXES,
    CUT_AS,
    EMBED_AXES,
    HEAD_AXES,
    Axes,
    block_axes,
    block_names,
    embed_names,
    head_names,
    mtp_axes,
    mtp_inputs,
    mtp_names,
    sections,
)
from superstep.plan.model.shape import ModelShape

RESIDUAL = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "down_proj.weight")
"""Endings of names of layers that add to the residual stream. Their initial values are smaller by sqrt(2 · layers), so
that depth does not grow the stream's variance (Radford 2019).
"""


BIAS_STEP = 1e-3
"""What a step adds to the bias of an expert with less than the mean load, and takes from others (DeepSeek-AI 2024,
"DeepSeek-V3", sec. 4.2).
"""


def units(shape: ModelShape) -> tuple[UnitSpec, ...]:
    """The decoder as units: ``embed``, ``block.0``, ..., ``head``. A tied head names the embedding's parameter."""
    ropes = layer_ropes(shape)
    exchange = ("exchange",) if shape.moe else ()

    def block(layer: int) -> UnitSpec:
        names, own = block_names(shape, layer), shape.at(layer)
        params = {local: _block_spec(own, names[local], local, axes) for local, axes in block_axes(own).items()}
        mixing = ("scan",) if own.delta else ("attend", "positions")
        build = partial(Block, shape, ropes[layer], layer)
        return UnitSpec(name=f"block.{layer}", build=build, params=params, takes=mixing + exchange)

    embed = {local: _spec(embed_names()[local], axes, shape.init_std) for local, axes in EMBED_AXES.items()}
    offset = shape.style.norm_offset
    head = {local: _spec(head_names(shape)[local], axes, shape.init_std, offset) for local, axes in HEAD_AXES.items()}
    of_mtp, of_head = mtp_inputs(shape)
    return (
        UnitSpec(name="embed", build=partial(Embedding, shape), params=embed),
        *(block(layer) for layer in range(shape.layers)),
        *([_mtp_spec(shape, ropes[-1], of_mtp)] if of_mtp else []),
        UnitSpec(name="head", build=partial(Head, shape), params=head, inputs=of_head),
    )


def _mtp_spec(shape: ModelShape, rope: Rope, inputs: tuple[str, ...]) -> UnitSpec:
    names = mtp_names(shape)
    params = {local: _block_spec(shape, names[local], local, axes) for local, axes in mtp_axes(shape).items()}
    build = partial(FurtherToken, shape, rope)
    return UnitSpec(name="mtp", build=build, params=params, inputs=inputs, takes=("attend", "positions"))


def _block_spec(shape: ModelShape, name: str, local: str, axes: Axes) -> ParamSpec:
    std = shape.init_std / (math.sqrt(2 * shape.layers) if local.endswith(RESIDUAL) else 1.0)
    if "router" in axes and shape.moe and shape.moe.router == "noisy-topk":
        std = 0.0  # without signal and with noise alone the load starts even (Shazeer 2017, appendix A)
    if local in CHOICE_AXES:
        return ParamSpec(name=name, axes=axes, std=0.0, is_statistic=True, sign_step=BIAS_STEP)
    if axes[0] != "experts" or shape.style.expert_biases:  # the latter are stored as one tensor
        return _delta_spec(shape, _spec(name, axes, std, shape.style.norm_offset), local)
    assert shape.moe is not None
    start, end = name.split(".experts.")
    stack = tuple(f"{start}.experts.{expert}.{end}" for expert in range(shape.moe.experts))
    return ParamSpec(name=name, axes=axes, std=std, stack=stack)


def _delta_spec(shape: ModelShape, spec: ParamSpec, local: str) -> ParamSpec:
    """The spec of a parameter that linear attention may have: a norm without an offset, decays spread over heads."""
    if shape.delta is None or not local.startswith("linear_attn."):
        return spec
    heads = shape.delta.value_heads
    match local.removeprefix("linear_attn."):
        case "A_log":  # the quantiles of transformers' log of a uniform number up to 16
            return replace(spec, values=((torch.arange(heads) + 0.5) * 16 / heads).log())
        case "dt_bias" | "norm.weight":
            return replace(spec, std=None)
    return replace(spec, sections=sections(shape, local))


def _spec(name: str, axes: Axes, std: float, offset: float = 0.0) -> ParamSpec:
    """Matrices and sinks start normal, weights of norms as ones, or zeros where one is added, and biases as zeros."""
    cuts = tuple(CUT_AS.get(axis, axis) for axis in axes)
    if name.endswith("bias"):
        return ParamSpec(name=name, axes=cuts, std=0.0)
    is_norm = len(axes) == 1 and axes != ("sinks",)
    return ParamSpec(name=name, axes=cuts, std=(0.0 if offset else None) if is_norm else std)
