"""The decoder's table of axes: a logical axis for each dim of each parameter, by its name in the unit's module.

    vocab, embed      the vocabulary; the residual stream
    heads, kv_heads   heads · head_dim rows: cut between heads only
    sinks             a number for each head, cut with the heads
    ffn               the inner width of the feed-forward
    norm, head_dim    weights of the norms: on the residual stream, on one head
    each_head         one row for each head; distances: columns of position biases

In a mixture of experts a token stays on its rank until it is sent to its experts. So what comes before, the router, and
the shared experts are whole on every rank with tokens:

    experts           the experts: cut between them only
    expert_ffn        the inner width of one expert
    expert_gate_up    gate and up of an expert as one matrix: twice that
    shared_ffn        the inner width of all shared experts together
    token_norm        weights of a norm with an output that stays with its tokens
    router            the router's outputs, one or two for each expert
"""

from __future__ import annotations

from collections.abc import Mapping

from superstep.plan.config import Positions
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.hf_config import model_type
from superstep.plan.model.outline import Layer, Outline, Parameter, Unit
from superstep.plan.model.shape import T5_BUCKETS, Latent, ModelShape, MoeShape
from superstep.plan.model.style import NORM_NAMES

Axes = tuple[str, ...]

EMBED_WEIGHT = "model.embed_tokens.weight"
EMBED_AXES: Mapping[str, Axes] = {
    "embed_tokens.weight": ("vocab", "embed"),
}
ATTENTION_AXES: Mapping[str, Axes] = {
    "self_attn.q_proj.weight": ("heads", "embed"),
    "self_attn.k_proj.weight": ("kv_heads", "embed"),
    "self_attn.v_proj.weight": ("kv_heads", "embed"),
    "self_attn.o_proj.weight": ("embed", "heads"),
}
QKV_BIAS_AXES: Mapping[str, Axes] = {
    "self_attn.q_proj.bias": ("heads",),
    "self_attn.k_proj.bias": ("kv_heads",),
    "self_attn.v_proj.bias": ("kv_heads",),
}
OUT_BIAS_AXES: Mapping[str, Axes] = {
    "self_attn.out_bias.weight": ("norm",),
}
SINK_AXES: Mapping[str, Axes] = {
    "self_attn.sinks.weight": ("sinks",),
}
NARROW_QUERY_AXES: Mapping[str, Axes] = {
    "self_attn.q_a_proj.weight": ("query_rank", "embed"),
    "self_attn.q_a_layernorm.weight": ("query_rank",),
    "self_attn.q_b_proj.weight": ("query_heads", "query_rank"),
}
WIDE_QUERY_AXES: Mapping[str, Axes] = {
    "self_attn.q_proj.weight": ("query_heads", "embed"),
}
LATENT_AXES: Mapping[str, Axes] = {
    "self_attn.kv_a_proj_with_mqa.weight": ("key_rank_rotated", "embed"),
    "self_attn.kv_a_layernorm.weight": ("key_rank",),
    "self_attn.kv_b_proj.weight": ("key_value_heads", "key_rank"),
    "self_attn.o_proj.weight": ("embed", "heads"),
}
QUERY_GATE_AXES: Mapping[str, Axes] = {
    "self_attn.q_proj.weight": ("gated_heads", "embed"),
}
_DELTA_GATES: Mapping[str, Axes] = {
    "linear_attn.A_log": ("delta_heads",),
    "linear_attn.dt_bias": ("delta_heads",),
}
_DELTA_OUT: Mapping[str, Axes] = {
    "linear_attn.norm.weight": ("delta_head",),
    "linear_attn.out_proj.weight": ("embed", "delta_values"),
}
DELTA_AXES: Mapping[str, Axes] = {
    "linear_attn.in_proj_qkv.weight": ("delta_qkv", "embed"),
    "linear_attn.in_proj_z.weight": ("delta_values", "embed"),
    "linear_attn.in_proj_b.weight": ("delta_heads", "embed"),
    "linear_attn.in_proj_a.weight": ("delta_heads", "embed"),
    "linear_attn.conv1d.weight": ("delta_qkv", "one", "taps"),
    **_DELTA_GATES,
    **_DELTA_OUT,
}
GROUPED_DELTA_AXES: Mapping[str, Axes] = {
    "linear_attn.in_proj_qkvz.weight": ("delta_qkvz", "embed"),
    "linear_attn.in_proj_ba.weight": ("delta_ba", "embed"),
    "linear_attn.conv1d.weight": ("delta_qkv", "one", "taps"),
    **_DELTA_GATES,
    **_DELTA_OUT,
}
MLP_AXES: Mapping[str, Axes] = {
    "mlp.gate_proj.weight": ("ffn", "embed"),
    "mlp.up_proj.weight": ("ffn", "embed"),
    "mlp.down_proj.weight": ("embed", "ffn"),
}
MOE_AXES: Mapping[str, Axes] = {
    "mlp.gate.weight": ("router", "embed"),
    "mlp.experts.gate_proj.weight": ("experts", "expert_ffn", "embed"),
    "mlp.experts.up_proj.weight": ("experts", "expert_ffn", "embed"),
    "mlp.experts.down_proj.weight": ("experts", "embed", "expert_ffn"),
}
BIASED_MOE_AXES: Mapping[str, Axes] = {
    "mlp.gate.weight": ("router", "embed"),
    "mlp.gate.bias": ("router",),
    "mlp.experts.gate_up_proj.weight": ("experts", "embed", "expert_gate_up"),
    "mlp.experts.gate_up_bias.weight": ("experts", "expert_gate_up"),
    "mlp.experts.down_proj.weight": ("experts", "expert_ffn", "embed"),
    "mlp.experts.down_bias.weight": ("experts", "embed"),
}
CHOICE_AXES: Mapping[str, Axes] = {
    "mlp.gate.e_score_correction_bias": ("router",),
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
WIDE_QK_NORM_AXES: Mapping[str, Axes] = {
    "self_attn.q_norm.weight": ("heads",),
    "self_attn.k_norm.weight": ("kv_heads",),
}
SHARED_GATE_AXES: Mapping[str, Axes] = {
    "mlp.shared_expert_gate.weight": ("shared_gate", "embed"),
}
POSITION_AXES: Mapping[Positions, Mapping[str, Axes]] = {
    "rope": {},
    "alibi": {},
    "t5": {"self_attn.position_bias.weight": ("each_head", "distances")},
    "relative": {"self_attn.position_bias.weight": ("heads", "distances")},
}
CUT_AS = {
    **dict.fromkeys(("query_heads", "key_value_heads", "gated_heads", "each_head", "sinks"), "heads"),
    **dict.fromkeys(("delta_qkv", "delta_qkvz", "delta_values", "delta_heads", "delta_ba"), "heads"),
    "delta_head": "head_dim",
    "shared_gate": "shared_ffn",
}
"""Axes with other numbers for each head, which are also cut between heads; that of a norm of each head, and the one
number that gates shared experts.
"""
MTP_AXES: Mapping[str, Axes] = {
    "embed.embed_tokens.weight": ("vocab", "embed"),
    "pre_fc_norm_embedding.weight": ("norm",),
    "pre_fc_norm_hidden.weight": ("norm",),
    "fc.weight": ("embed", "joined"),
    "norm.weight": ("norm",),
}
"""Of multi-token prediction, beside its block; ``joined``: an embedding and the residual stream."""
NEXT_TOKENS = "next_tokens"
"""The field of a batch with the token after each."""
HEAD_AXES: Mapping[str, Axes] = {
    "norm.weight": ("norm",),
    "lm_head.weight": ("vocab", "embed"),
}


def block_axes(shape: ModelShape) -> dict[str, Axes]:
    before, after, before_inner, after_inner = map(_norm_axes, NORM_NAMES[shape.style.norms])
    tables = [before, *_mixer_axes(shape), after]
    if shape.moe is None:
        tables += [before_inner, MLP_AXES, after_inner]
    else:
        experts = BIASED_MOE_AXES if shape.style.expert_biases else MOE_AXES
        tables += [dict.fromkeys(before_inner, ("token_norm",)), experts]
    if shape.moe and shape.moe.router == "noisy-topk":
        tables.append(SPREAD_AXES)
    if shape.moe and shape.moe.router == "sigmoid":
        tables.append(CHOICE_AXES)
    if shape.moe and shape.moe.shared_experts:
        tables.append(SHARED_AXES)
        if shape.style.shared_gate:
            tables.append(SHARED_GATE_AXES)
    return {local: axes for table in tables for local, axes in table.items()}


def _mixer_axes(shape: ModelShape) -> list[Mapping[str, Axes]]:
    if shape.delta is not None:
        return [GROUPED_DELTA_AXES if shape.delta.is_grouped else DELTA_AXES]
    if shape.latent is None:
        tables = [ATTENTION_AXES]
    else:
        tables = [WIDE_QUERY_AXES if shape.latent.query_rank is None else NARROW_QUERY_AXES, LATENT_AXES]
    if shape.style.output_gate:
        tables.append(QUERY_GATE_AXES)
    if shape.qkv_bias:
        tables.append(QKV_BIAS_AXES)
    if shape.style.out_bias:
        tables.append(OUT_BIAS_AXES)
    if shape.style.attention_sinks:
        tables.append(SINK_AXES)
    if shape.qk_norm:
        tables.append(WIDE_QK_NORM_AXES if shape.has_wide_qk_norm else QK_NORM_AXES)
    return [*tables, POSITION_AXES[shape.positions]]


def _norm_axes(name: str | None) -> Mapping[str, Axes]:
    return {} if name is None else {f"{name}.weight": ("norm",)}


def embed_names() -> dict[str, str]:
    """Global names of the embedding's parameters."""
    return {local: f"model.{local}" for local in EMBED_AXES}


def block_names(shape: ModelShape, layer: int) -> dict[str, str]:
    """Global names of a block's parameters."""
    return {local: f"model.layers.{layer}.{_hf_name(shape, local)}" for local in block_axes(shape.at(layer))}


MIXTRAL = {"mlp.": "block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
"""Mixtral's names on disk."""

GPT_OSS = {
    "self_attn.sinks.weight": "self_attn.sinks",
    "self_attn.out_bias.weight": "self_attn.o_proj.bias",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.experts.gate_up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_bias.weight": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
    "mlp.experts.down_bias.weight": "mlp.experts.down_proj_bias",
}
"""gpt-oss's names on disk."""


def _hf_name(shape: ModelShape, local: str) -> str:
    if shape.style.expert_biases:
        return GPT_OSS.get(local, local)
    if shape.style.shared_gate:
        return local.replace(".shared_experts.", ".shared_expert.")
    if shape.moe is None or not local.startswith("mlp.") or model_type(shape) != "mixtral":
        return local
    for ours, theirs in MIXTRAL.items():
        local = local.replace(ours, theirs)
    return local


def mtp_axes(shape: ModelShape) -> dict[str, Axes]:
    """Of the unit of multi-token prediction, whose block is like the last one."""
    block = block_axes(shape.at(shape.layers - 1))
    return {**MTP_AXES, **{f"layers.0.{local}": axes for local, axes in block.items()}}


def mtp_names(shape: ModelShape) -> dict[str, str]:
    """Global names of its parameters; the embedding is the model's."""
    own = {local: f"mtp.{local}" for local in mtp_axes(shape)}
    return own | {"embed.embed_tokens.weight": EMBED_WEIGHT}


def mtp_inputs(shape: ModelShape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the unit of multi-token prediction takes, and what the head takes with it; empty without it."""
    if shape.mtp_weight is None:
        return (), ()
    last = f"block.{shape.layers - 1}"
    return (last, NEXT_TOKENS), (last, "mtp")


def head_names(shape: ModelShape) -> dict[str, str]:
    """Global names of the head's parameters; a tied head names the embedding's."""
    return {"norm.weight": "model.norm.weight", "lm_head.weight": EMBED_WEIGHT if shape.tied else "lm_head.weight"}


def sizes(shape: ModelShape) -> dict[str, int]:
    """Elements along each logical axis."""
    return {
        "vocab": shape.vocab,
        "embed": shape.width,
        "heads": shape.heads * shape.head_dim,
        "sinks": shape.heads,
        "kv_heads": shape.kv_heads * shape.head_dim,
        "ffn": shape.ffn,
        "norm": shape.width,
        "head_dim": shape.head_dim,
        "joined": 2 * shape.width,
        "each_head": shape.heads,
        "distances": T5_BUCKETS if shape.positions == "t5" else shape.max_distance + 1,
        **(_mixture_sizes(shape, shape.moe) if shape.moe else {}),
        **(_latent_sizes(shape, shape.latent) if shape.latent else {}),
        "gated_heads": 2 * shape.heads * shape.head_dim,
        **(_delta_sizes(shape.delta) if shape.delta else {}),
    }


def _latent_sizes(shape: ModelShape, latent: Latent) -> dict[str, int]:
    return {
        "query_rank": latent.query_rank or 0,
        "key_rank": latent.key_rank,
        "key_rank_rotated": latent.key_rank + latent.rotated,
        "query_heads": shape.heads * (shape.head_dim + latent.rotated),
        "key_value_heads": 2 * shape.heads * shape.head_dim,
    }


def _delta_sizes(delta: DeltaShape) -> dict[str, int]:
    *_, values = delta.sections
    return {
        "delta_qkv": sum(delta.sections),
        "delta_qkvz": sum(delta.sections) + values,
        "delta_values": values,
        "delta_heads": delta.value_heads,
        "delta_ba": 2 * delta.value_heads,
        "delta_head": delta.value_dim,
        "one": 1,
        "taps": delta.taps,
    }


def sections(shape: ModelShape, local: str) -> tuple[int, ...]:
    """Rows of each part of a parameter that is cut on its own: queries, keys, values; () where it is cut as a whole."""
    return _sections(shape.delta, block_axes(shape)[local])


def _sections(delta: DeltaShape | None, axes: Axes) -> tuple[int, ...]:
    return delta.sections if delta is not None and axes[0] == "delta_qkv" else ()


def _mixture_sizes(shape: ModelShape, moe: MoeShape) -> dict[str, int]:
    return {
        "experts": moe.experts,
        "expert_ffn": shape.ffn,
        "expert_gate_up": 2 * shape.ffn,
        "shared_ffn": moe.shared_experts * shape.ffn,
        "shared_gate": 1,
        "token_norm": shape.width,
        "router": moe.experts,
    }


def outline_of(shape: ModelShape) -> Outline:
    """The decoder's outline: ``embed``, ``block.0``, ..., ``head``; before the head that of multi-token prediction."""
    kinds = {each: (sizes(each), block_axes(each)) for each in {shape.at(layer) for layer in range(shape.layers)}}
    size = sizes(shape)

    of_mtp, of_head = mtp_inputs(shape)

    def unit(
        name: str,
        axes: Mapping[str, Axes],
        names: Mapping[str, str],
        size: Mapping[str, int] = size,
        inputs: tuple[str, ...] = (),
        delta: DeltaShape | None = None,
    ) -> Unit:
        parameters = (
            Parameter(
                name=names[local],
                axes=tuple(CUT_AS.get(axis, axis) for axis in a),
                dims=tuple(size[axis] for axis in a),
                layer=_layer(local, a),
                is_statistic=local in CHOICE_AXES,
                sections=_sections(delta, a),
            )
            for local, a in axes.items()
        )
        return Unit(name, tuple(parameters), inputs)

    def block(layer: int) -> Unit:
        size, table = kinds[shape.at(layer)]
        return unit(f"block.{layer}", table, block_names(shape, layer), size, delta=shape.at(layer).delta)

    return Outline(
        (
            unit("embed", EMBED_AXES, embed_names()),
            *(block(layer) for layer in range(shape.layers)),
            *([unit("mtp", mtp_axes(shape), mtp_names(shape), inputs=of_mtp)] if of_mtp else []),
            unit("head", HEAD_AXES, head_names(shape), inputs=of_head),
        )
    )


def _layer(local: str, axes: Axes) -> Layer:
    # What a mixture is made of works on a rank's own tokens, so that tp cannot cut it.
    if {"experts", "router", "shared_ffn", "shared_gate"} & set(axes):
        return "other"
    is_of_heads = axes in WIDE_QK_NORM_AXES.values() or axes == ("sinks",) or local in _DELTA_GATES
    if local.endswith(".bias") or is_of_heads:
        return "linear"
    if len(axes) == 1:
        return "other"
    return "embedding" if local.endswith("embed_tokens.weight") or "distances" in axes else "linear"
