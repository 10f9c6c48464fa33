"""Hugging Face model types: the defaults of a file's keys, and which keys may have one value only.

Every other key is honoured by ``hf_config`` or stands in ``HARMLESS``, or is refused. The values are those of
transformers' configuration classes, with which a test compares them.
"""

from __future__ import annotations

from typing import Any, Literal

ModelType = Literal[
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    "gpt_oss",
    "granite",
    "qwen3_5_text",
    "qwen3_next",
    "superstep_moe",
    "superstep_bias",
]

PRICED_TYPE = "deepseek_v2"
"""A model type that is priced and not trained."""

ARCHITECTURES: dict[ModelType, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "superstep_moe": "SuperstepMoe",
    "superstep_bias": "SuperstepBias",
}

_LLAMA: dict[str, Any] = {
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MISTRAL = _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_MIXTRAL = _MISTRAL | {
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "router_z_loss_coef": 0.0,
}
_SLIDING = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN2 = _LLAMA | {
    **_SLIDING,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "layer_types": None,
}
_QWEN3_MOE = _LLAMA | {
    **_SLIDING,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 768,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "router_z_loss_coef": 0.0,
}
_OLMO2 = _LLAMA | {"rms_norm_eps": 1e-5}
_OLMO3 = _OLMO2 | {
    "sliding_window": 4096,
    "layer_types": None,
    "rope_theta": 500000.0,
    "rope_local_base_freq": 500000.0,
}
_GEMMA2 = _LLAMA | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = _GEMMA2 | {
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
_GRANITE = _LLAMA | dict.fromkeys(
    ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
_DELTA = _LLAMA | {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_NEXT = _DELTA | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_local_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "router_z_loss_coef": 0.0,
}
_GPT_OSS = _LLAMA | {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "layer_types": None,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.001,
    "router_z_loss_coef": 0.0,
}
_DEEPSEEK = _LLAMA | {
    "num_key_value_heads": 128,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "router_aux_loss_coef": 0.0,
    "router_z_loss_coef": 0.0,
}

DEFAULTS: dict[ModelType, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MIXTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_moe": _QWEN3_MOE,
    "olmo2": _OLMO2,
    "olmo3": _OLMO3,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": _GPT_OSS,
    "granite": _GRANITE,
    "qwen3_5_text": _DELTA | {"num_key_value_heads": 4},
    "qwen3_next": _QWEN3_NEXT,
    "superstep_moe": _LLAMA | {"sliding_window": None},
    "superstep_bias": _LLAMA | {"sliding_window": None},
}
"""Defaults of keys. Sizes have none: a file without them is refused. Special tokens have none either, as they follow
from the tokenizer.
"""

_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "is_encoder_decoder": (False,),
    "return_dict": (True,),
    "use_mrope": (False,),
    "quantization_config": (),
    "auto_map": (),
}
_WITHOUT_WINDOW = {"use_sliding_window": (False,)}
_GELU: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),  # older files have both; transformers reads the other one
    "use_bidirectional_attention": (False,),
}
_GATED_OUTPUT: dict[str, tuple[Any, ...]] = {"attn_output_gate": (True,)}


def only(kind: ModelType) -> dict[str, tuple[Any, ...]]:
    """Keys that may only have one of these values; left out or null means the first. An empty tuple allows null."""
    own: dict[ModelType, dict[str, tuple[Any, ...]]] = {
        "llama": _WITHOUT_WINDOW,
        "mistral": _WITHOUT_WINDOW,
        "mixtral": _WITHOUT_WINDOW | {"router_jitter_noise": (0.0,)},
        "qwen2": {"attention_bias": (True,)},
        "qwen3": {},
        "qwen3_moe": {
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            "qkv_bias": (False,),
            "use_qk_norm": (True,),
            "shared_expert_intermediate_size": (0,),
        },
        "olmo2": {},
        "olmo3": {"rope_local_base_freq": (500000.0,)},
        "gemma2": _GELU,
        "gemma3_text": _GELU | {"attn_logit_softcapping": ()},
        "deepseek_v3": {
            "rope_interleave": (True,),
            "moe_layer_freq": (1,),
            "topk_method": ("noaux_tc",),
            "scoring_func": ("sigmoid",),
        },
        "gpt_oss": {"attention_bias": (True,)},
        "granite": {},
        "qwen3_5_text": _GATED_OUTPUT,
        "qwen3_next": _GATED_OUTPUT | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
        "superstep_moe": _WITHOUT_WINDOW,
        "superstep_bias": _WITHOUT_WINDOW,
    }
    everywhere = {key: values for key, values in _EVERYWHERE.items() if key not in DEFAULTS[kind]}
    return everywhere | own[kind] | {"architectures": ([ARCHITECTURES[kind]],)}


_STATES = "layers of a state space"
OTHER_LAYERS: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _STATES),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba", "zamba2"), _STATES),
    **dict.fromkeys(("kimi_linear", "minimax"), "layers of linear attention"),
    **dict.fromkeys(("recurrent_gemma", "rwkv"), "recurrent layers"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "layers of short convolutions"),
    "qwen3_vl_moe": "experts behind an encoder of pictures",
}
"""Model types with layers other than attention, and what these are."""

MORE_THAN_TEXT = {"qwen2_audio": "sounds", "qwen3_vl": "pictures"}
"""Model types of ``plan.model.multimodal``, and what they read beside text."""

_GENERATION = (
    "max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
)
_REASONS: dict[str, str] = {
    "model_type transformers_version _name_or_path name_or_path _commit_hash": "origin of the file",
    "torch_dtype dtype": "dtype of the stored weights; in training numerics.compute decides",
    "use_cache cache_implementation _attn_implementation attn_implementation _attn_implementation_autoset "
    "experts_implementation _experts_implementation": "how a forward pass is computed, not its result",
    "output_attentions output_hidden_states output_router_logits return_dict_in_generate": (
        "what a forward pass returns; in training only the coefficient of the router's loss counts"
    ),
    "id2label label2id num_labels problem_type finetuning_task": "only classifiers read it",
    "chunk_size_feed_forward": "only encoders read it",
    "tokenizer_class prefix task_specific_params": "only tokenizers and pipelines read it",
    _GENERATION: "only generation reads it",
}
HARMLESS: dict[str, str] = {key: reason for keys, reason in _REASONS.items() for key in keys.split()}
"""Keys that change neither the model nor its training, each with the reason."""

_FURTHER_HEADS = {
    **dict.fromkeys(
        ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), "heads for further tokens, which nothing here loads"
    ),
    "mamba_ssm_dtype": "dtype of the state; here it is fp32",
}

HARMLESS_IN: dict[ModelType, dict[str, str]] = {
    "qwen3_moe": {
        "intermediate_size": "width of dense blocks; an accepted file has none",
        "max_window_layers": "transformers does not read it: all layers have a sliding window, or none",
    },
    "qwen3_5_text": _FURTHER_HEADS,
    "qwen3_next": _FURTHER_HEADS | {"intermediate_size": "width of dense blocks; an accepted file has none"},
    "gemma3_text": {"_sliding_window_pattern": "transformers writes it and does not read it"},
    "deepseek_v3": {
        **dict.fromkeys(
            ("num_nextn_predict_layers", "num_mtp_layers"), "heads for further tokens, which nothing here loads"
        ),
        **dict.fromkeys(("ep_size", "seq_aux", "aux_loss_alpha"), "transformers does not read it"),
    },
    "gpt_oss": {"initial_context_length": "transformers does not read it: the scaling of wavelengths has this number"},
}
"""The same for one model type."""
