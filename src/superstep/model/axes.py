"""The decoder's units, and the table that stands beside it: a logical axis for each dim of each parameter.

The plan's rules map logical axes to mesh axes (``heads -> tp``), as GSPMD does by annotation (Xu 2021); the
model itself knows nothing of them.

    vocab, embed      the vocabulary; the residual stream
    heads, kv_heads   heads · head_dim rows: cut between heads only
    ffn               the inner width of the feed-forward
    norm, head_dim    weights of the norms: on the residual stream, on one head

In a mixture of experts every token stays where it is until it is sent to its experts, so that what comes before, the
router, and what stands beside, the shared experts, are whole on every rank that has tokens:

    experts           the experts: cut between them only
    expert_ffn        the inner width of one expert
    shared_ffn        that of all shared experts together
    token_norm        weights of a norm whose output stays with its tokens
    router            the router's outputs, one or two for each expert
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from superstep.model.decoder import Block, Embedding, Head, Rope
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.hf_config import model_type
from superstep.plan.shape import ModelShape

Axes = tuple[str, ...]

EMBED_WEIGHT = "model.embed_tokens.weight"
EMBED_AXES: Mapping[str, Axes] = {
    "embed_tokens.weight": ("vocab", "embed"),
}
ATTENTION_AXES: Mapping[str, Axes] = {
    "input_layernorm.weight": ("norm",),
    "self_attn.q_proj.weight": ("heads", "embed"),
    "self_attn.k_proj.weight": ("kv_heads", "embed"),
    "self_attn.v_proj.weight": ("kv_heads", "embed"),
    "self_attn.o_proj.weight": ("embed", "heads"),
}
MLP_AXES: Mapping[str, Axes] = {
    "post_attention_layernorm.weight": ("norm",),
    "mlp.gate_proj.weight": ("ffn", "embed"),
    "mlp.up_proj.weight": ("ffn", "embed"),
    "mlp.down_proj.weight": ("embed", "ffn"),
}
MOE_AXES: Mapping[str, Axes] = {
    "post_attention_layernorm.weight": ("token_norm",),
    "mlp.gate.weight": ("router", "embed"),
    "mlp.experts.gate_proj.weight": ("experts", "expert_ffn", "embed"),
    "mlp.experts.up_proj.weight": ("experts", "expert_ffn", "embed"),
    "mlp.experts.down_proj.weight": ("experts", "embed", "expert_ffn"),
}
SPREAD_AXES: Mapping[str, Axes] = {
    "mlp.gate.spread": ("router", "embed"),
}
SHARED_AXES: Mapping[str, Axes] = {
    "mlp.shared_experts.gate_proj.weight": ("shared_ffn", "embed"),
    "mlp.shared_experts.up_proj.weight": ("shared_ffn", "embed"),
    "mlp.shared_experts.down_proj.weight": ("embed", "shared_ffn"),
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
RESIDUAL = ("self_attn.o_proj.weight", "down_proj.weight")
"""How the names end of what is added to the residual stream. It starts at STD / sqrt(2 · layers), so that depth does
not grow the stream's variance (Radford 2019)."""


def units(shape: ModelShape) -> tuple[UnitSpec, ...]:
    """The decoder as units: ``embed``, ``block.0``, ..., ``head``. A tied head names the embedding's."""
    rope = Rope(shape)
    axes_of_block = block_axes(shape)
    takes = ("attend", "positions", "exchange") if shape.moe else ("attend", "positions")

    def block(layer: int) -> UnitSpec:
        params = {local: _block_spec(shape, layer, local, axes) for local, axes in axes_of_block.items()}
        return UnitSpec(name=f"block.{layer}", build=partial(Block, shape, rope, layer), params=params, takes=takes)

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


def block_axes(shape: ModelShape) -> dict[str, Axes]:
    """The table of one block."""
    tables = [ATTENTION_AXES]
    if shape.qk_norm:
        tables.append(QK_NORM_AXES)
    tables.append(MLP_AXES if shape.moe is None else MOE_AXES)
    if shape.moe and shape.moe.router == "noisy-topk":
        tables.append(SPREAD_AXES)
    if shape.moe and shape.moe.shared_experts:
        tables.append(SHARED_AXES)
    return {local: axes for table in tables for local, axes in table.items()}


def _block_spec(shape: ModelShape, layer: int, local: str, axes: Axes) -> ParamSpec:
    std = STD / math.sqrt(2 * shape.layers) if local.endswith(RESIDUAL) else STD
    if "router" in axes and shape.moe and shape.moe.router == "noisy-topk":
        std = 0.0  # with no signal and all noise the load starts even (Shazeer 2017, appendix A)
    name = f"model.layers.{layer}.{_renamed(shape, local)}"
    if axes[0] != "experts":
        return _spec(name, axes, std)
    assert shape.moe is not None
    start, end = name.split(".experts.")
    stack = tuple(f"{start}.experts.{expert}.{end}" for expert in range(shape.moe.experts))
    return ParamSpec(name=name, axes=axes, std=std, stack=stack)


MIXTRAL = {"mlp.": "block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
"""What Mixtral calls the parts of its mixture on disk."""


def _renamed(shape: ModelShape, local: str) -> str:
    if model_type(shape) != "mixtral" or not local.startswith("mlp."):
        return local
    for ours, theirs in MIXTRAL.items():
        local = local.replace(ours, theirs)
    return local


def _spec(name: str, axes: Axes, std: float) -> ParamSpec:
    """Matrices start normal, the weights of norms as ones."""
    return ParamSpec(name=name, axes=axes, std=std if len(axes) > 1 else None)
