"""DeepSeek-V3's ``config.json`` as a shape, and back: latent attention, and a router of sigmoid scores in groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from superstep.plan.model.hf_rope import read_rope
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.rope import YarnRope
from superstep.plan.model.shape import (
    Latent,
    ModelShape,
    MoeShape,
    balance_coefficient_of,
    balance_weight_of,
)


def read_latent_shape(keys: JsonKeys, place: str) -> ModelShape:
    """The shape in such a file. Raises ConfigError where a key has a value that the decoder does not have."""
    heads, head_dim = keys.whole("num_attention_heads"), keys.whole("v_head_dim")
    keys.require({"qk_nope_head_dim": (head_dim,), "num_key_value_heads": (heads,)})
    max_tokens, layers, k = keys.whole("max_position_embeddings"), keys.layers(), keys.whole("num_experts_per_tok")
    theta, scaling = read_rope(keys, place, max_tokens)
    if isinstance(scaling, YarnRope):
        raw = keys.get("rope_parameters") or keys.get("rope_scaling")
        scaling = replace(scaling, score_scale=float(raw.get("mscale_all_dim") or 0.0))
    rotated = keys.whole("qk_rope_head_dim")
    keys.require({"head_dim": (rotated,), "qk_head_dim": (rotated + head_dim,)})
    return ModelShape(
        family="qwen3",
        layers=layers,
        width=keys.whole("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=keys.whole("moe_intermediate_size"),
        vocab=keys.whole("vocab_size"),
        tied=keys.flag("tie_word_embeddings"),
        qk_norm=False,
        norm_eps=keys.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_tokens=max_tokens,
        init_std=keys.positive("initializer_range"),
        moe=MoeShape(
            router="sigmoid",
            experts=keys.whole("n_routed_experts"),
            experts_per_token=k,
            shared_experts=keys.whole("n_shared_experts", least=0),
            renormalise=keys.flag("norm_topk_prob"),
            capacity_factor=None,
            balance_weight=balance_weight_of(keys.number("router_aux_loss_coef"), experts_per_token=k, layers=layers),
            z_weight=keys.number("router_z_loss_coef"),
            groups=keys.whole("n_group"),
            groups_per_token=keys.whole("topk_group"),
            scale=keys.positive("routed_scaling_factor"),
        ),
        dense_layers=keys.whole("first_k_dense_replace", least=0),
        dense_ffn=keys.whole("intermediate_size"),
        latent=Latent(
            query_rank=None if keys.get("q_lora_rank") is None else keys.whole("q_lora_rank"),
            key_rank=keys.whole("kv_lora_rank"),
            rotated=rotated,
        ),
    )


def write_latent(shape: ModelShape) -> dict[str, Any]:
    """The keys that such a file has, or has otherwise than other families; none for others."""
    latent, moe = shape.latent, shape.moe
    if latent is None or moe is None:
        return {}
    k = moe.experts_per_token
    return {
        "intermediate_size": shape.dense_ffn or shape.ffn,
        "moe_intermediate_size": shape.ffn,
        "head_dim": latent.rotated,
        "qk_rope_head_dim": latent.rotated,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_rank,
        "first_k_dense_replace": shape.dense_layers,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": k,
        "n_group": moe.groups,
        "topk_group": moe.groups_per_token,
        "norm_topk_prob": moe.renormalise,
        "routed_scaling_factor": moe.scale,
        "router_aux_loss_coef": balance_coefficient_of(moe.balance_weight, experts_per_token=k, layers=shape.layers),
        "router_z_loss_coef": moe.z_weight,
        "num_nextn_predict_layers": 0,
    }
