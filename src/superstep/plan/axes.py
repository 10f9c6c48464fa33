"""The decoder's table of axes: a logical axis for each dim of each parameter, by its name in the unit's module.

vocab, embed      the vocabulary; the residual stream
heads, kv_heads   heads · head_dim rows: cut between heads only
ffn               the inner width of the feed-forward
norm, head_dim    weights of the norms: on the residual stream, on one head
"""

from __future__ import annotations

from collections.abc import Mapping

from superstep.plan.outline import Layer, Outline, Parameter, Unit
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


def block_axes(shape: ModelShape) -> dict[str, Axes]:
    """The table of one block."""
    return {**BLOCK_AXES, **QK_NORM_AXES} if shape.qk_norm else dict(BLOCK_AXES)


def embed_names() -> dict[str, str]:
    """Global names of the embedding's parameters."""
    return {local: f"model.{local}" for local in EMBED_AXES}


def block_names(shape: ModelShape, layer: int) -> dict[str, str]:
    """Global names of a block's parameters."""
    return {local: f"model.layers.{layer}.{local}" for local in block_axes(shape)}


def head_names(shape: ModelShape) -> dict[str, str]:
    """Global names of the head's parameters; a tied head names the embedding's."""
    return {"norm.weight": "model.norm.weight", "lm_head.weight": EMBED_WEIGHT if shape.tied else "lm_head.weight"}


def sizes(shape: ModelShape) -> dict[str, int]:
    """Elements along each logical axis."""
    return {
        "vocab": shape.vocab,
        "embed": shape.width,
        "heads": shape.heads * shape.head_dim,
        "kv_heads": shape.kv_heads * shape.head_dim,
        "ffn": shape.ffn,
        "norm": shape.width,
        "head_dim": shape.head_dim,
    }


def outline_of(shape: ModelShape) -> Outline:
    """The decoder as a plan sees it: ``embed``, ``block.0``, ..., ``head``."""
    size = sizes(shape)

    def unit(name: str, axes: Mapping[str, Axes], names: Mapping[str, str]) -> Unit:
        parameters = (
            Parameter(name=names[local], axes=a, dims=tuple(size[axis] for axis in a), layer=_layer(local, a))
            for local, a in axes.items()
        )
        return Unit(name, tuple(parameters))

    table = block_axes(shape)
    return Outline(
        (
            unit("embed", EMBED_AXES, embed_names()),
            *(unit(f"block.{layer}", table, block_names(shape, layer)) for layer in range(shape.layers)),
            unit("head", HEAD_AXES, head_names(shape)),
        )
    )


def _layer(local: str, axes: Axes) -> Layer:
    if len(axes) == 1:
        return "other"
    return "embedding" if local in EMBED_AXES else "linear"
