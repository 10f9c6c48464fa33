"""The decoder's units: its modules, and for each parameter its axes from ``plan.model.axes`` and its initial values.

The plan's rules map logical axes to mesh axes (``heads -> tp``), as GSPMD does by annotation (Xu 2021); the model
itself has no such knowledge.
"""

from __future__ import annotations

import math
from functools import partial

from superstep.model.decoder import Block, Embedding, Head
from superstep.model.rope import layer_ropes
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.model.axes import EMBED_AXES, HEAD_AXES, Axes, block_axes, block_names, embed_names, head_names
from superstep.plan.model.shape import ModelShape

RESIDUAL = ("self_attn.o_proj.weight", "down_proj.weight")
"""Endings of names of layers that add to the residual stream. Their initial values are smaller by sqrt(2 · layers), so
that depth does not grow the stream's variance (Radford 2019).
"""


def units(shape: ModelShape) -> tuple[UnitSpec, ...]:
    """The decoder as units: ``embed``, ``block.0``, ..., ``head``. A tied head names the embedding's parameter."""
    ropes = layer_ropes(shape)
    table = block_axes(shape)
    takes = ("attend", "positions", "exchange") if shape.moe else ("attend", "positions")

    def block(layer: int) -> UnitSpec:
        names = block_names(shape, layer)
        params = {local: _block_spec(shape, names[local], local, axes) for local, axes in table.items()}
        return UnitSpec(
            name=f"block.{layer}", build=partial(Block, shape, ropes[layer], layer), params=params, takes=takes
        )

    embed = {local: _spec(embed_names()[local], axes, shape.init_std) for local, axes in EMBED_AXES.items()}
    offset = shape.style.norm_offset
    head = {local: _spec(head_names(shape)[local], axes, shape.init_std, offset) for local, axes in HEAD_AXES.items()}
    return (
        UnitSpec(name="embed", build=partial(Embedding, shape), params=embed),
        *(block(layer) for layer in range(shape.layers)),
        UnitSpec(name="head", build=partial(Head, shape), params=head),
    )


def _block_spec(shape: ModelShape, name: str, local: str, axes: Axes) -> ParamSpec:
    std = shape.init_std / (math.sqrt(2 * shape.layers) if local.endswith(RESIDUAL) else 1.0)
    if "router" in axes and shape.moe and shape.moe.router == "noisy-topk":
        std = 0.0  # without signal and with noise alone the load starts even (Shazeer 2017, appendix A)
    if axes[0] != "experts":
        return _spec(name, axes, std, shape.style.norm_offset)
    assert shape.moe is not None
    start, end = name.split(".experts.")
    stack = tuple(f"{start}.experts.{expert}.{end}" for expert in range(shape.moe.experts))
    return ParamSpec(name=name, axes=axes, std=std, stack=stack)


def _spec(name: str, axes: Axes, std: float, offset: float = 0.0) -> ParamSpec:
    """Matrices start normal, the weights of norms as ones, or zeros where one is added, and biases as zeros."""
    start = 0.0 if name.endswith(".bias") or offset else None
    return ParamSpec(name=name, axes=axes, std=std if len(axes) > 1 else start)
