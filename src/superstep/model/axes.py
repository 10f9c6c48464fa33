"""The decoder's units, and the table that stands beside it: a logical axis for each dim of each parameter.

The plan's rules map logical axes to mesh axes (``heads -> tp``), as GSPMD does by annotation (Xu 2021); the
model itself knows nothing of them.

    vocab, embed      the vocabulary; the residual stream
    heads, kv_heads   heads · head_dim rows: cut between heads only
    ffn               the inner width of the feed-forward
    norm, head_dim    weights of the norms: on the residual stream, on one head
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from superstep.model.decoder import Block, Embedding, Head, Rope
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.shape import ModelShape

Axes = tuple[str, ...]

EMBED_WEIGHT = "model.embed_tokens.weight"
EMBED_AXES: Mapping[str, Axes] = {
    "embed_tokens.weight": ("vocab", "embed"),
}
BLOCK_AXES: Mapping[str, Axes] = {
    "input_layernorm.weight": ("norm",),
    "self_attn.q_proj.weight": ("heads", "embed"),
    "self_attn.k_proj.weight": ("kv_heads", "embed"),
    "self_attn.v_proj.weight": ("kv_heads", "embed"),
    "self_attn.o_proj.weight": ("embed", "heads"),
    "post_attention_layernorm.weight": ("norm",),
    "mlp.gate_proj.weight": ("ffn", "embed"),
    "mlp.up_proj.weight": ("ffn", "embed"),
    "mlp.down_proj.weight": ("embed", "ffn"),
}
QK_NORM_AXES: Mapping[str, Axes] = {
    "self_attn.q_norm.weight": ("head_dim",),
    "self_attn.k_norm.weight": ("head_dim",),
}
HEAD_AXES: Mapping[str, Axes] = {
    "norm.weight": ("norm",),
    "lm_head.weight": ("vocab", "embed"),
}

STD = 0.02
RESIDUAL = frozenset({"self_attn.o_proj.weight", "mlp.down_proj.weight"})
"""What is added to the residual stream. It starts at STD / sqrt(2 · layers), so that depth does not grow the
stream's variance (Radford 2019)."""


def units(shape: ModelShape) -> tuple[UnitSpec, ...]:
    """The decoder as units: ``embed``, ``block.0``, ..., ``head``. A tied head names the embedding's."""
    rope = Rope(shape)
    block_axes = {**BLOCK_AXES, **QK_NORM_AXES} if shape.qk_norm else BLOCK_AXES
    small = STD / math.sqrt(2 * shape.layers)

    def block(layer: int) -> UnitSpec:
        params = {
            local: _spec(f"model.layers.{layer}.{local}", axes, small if local in RESIDUAL else STD)
            for local, axes in block_axes.items()
        }
        return UnitSpec(
            name=f"block.{layer}", build=partial(Block, shape, rope), params=params, takes=("attend", "positions")
        )

    embed = {local: _spec(f"model.{local}", axes, STD) for local, axes in EMBED_AXES.items()}
    head_names = {
        "norm.weight": "model.norm.weight",
        "lm_head.weight": EMBED_WEIGHT if shape.tied else "lm_head.weight",
    }
    head = {local: _spec(head_names[local], axes, STD) for local, axes in HEAD_AXES.items()}
    return (
        UnitSpec(name="embed", build=partial(Embedding, shape), params=embed),
        *(block(layer) for layer in range(shape.layers)),
        UnitSpec(name="head", build=partial(Head, shape), params=head),
    )


def _spec(name: str, axes: Axes, std: float) -> ParamSpec:
    """Matrices start normal, the weights of norms as ones."""
    return ParamSpec(name=name, axes=axes, std=std if len(axes) > 1 else None)
