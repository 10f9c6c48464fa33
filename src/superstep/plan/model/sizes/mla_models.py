"""DeepSeek-V2's ``config.json``: latent attention and experts, which are priced, but cannot be trained yet."""

from __future__ import annotations

from pathlib import Path

from superstep.plan.model.hf_config import plain, read_json
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.shape import ROTATED, Latent, ModelShape, dropless

DEFAULTS = {
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def from_latent_config(path: Path) -> ModelShape:
    """The shape in such a model's ``config.json``, for pricing. Raises ConfigError where a number is missing, or
    differs where the formulas know only one value.
    """
    keys = JsonKeys(read_json(path), f"{path}: ", DEFAULTS)
    heads, head_dim = keys.whole("num_attention_heads"), keys.whole("v_head_dim")
    # What the closed form of latent attention takes as given.
    keys.require({"qk_rope_head_dim": (ROTATED,), "qk_nope_head_dim": (head_dim,), "moe_layer_freq": (1,)})
    return ModelShape(
        **plain(keys),
        layers=keys.layers(),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=keys.whole("moe_intermediate_size"),
        moe=dropless(
            keys.whole("n_routed_experts"),
            keys.whole("num_experts_per_tok"),
            shared_experts=keys.whole("n_shared_experts"),
        ),
        dense_layers=keys.whole("first_k_dense_replace", least=0),
        dense_ffn=keys.whole("intermediate_size"),
        latent=Latent(query_rank=keys.whole("q_lora_rank"), key_rank=keys.whole("kv_lora_rank")),
    )
