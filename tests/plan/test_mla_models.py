"""Models with latent attention: their parameters are those that were published, and nothing runs those that are only
priced.
"""

from __future__ import annotations

import json
import math

import pytest

from superstep.cost.closed.model_numbers import decoder_of
from superstep.cost.program.flops import model_flops_per_token, parameters
from superstep.errors import ConfigError
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.model.axes import outline_of
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import resolve

DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 1, "topk_group": 4, "n_group": 8,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
OLDER = DEEPSEEK | {"model_type": "deepseek_v2"}
KIMI = DEEPSEEK | {  # moonshotai/Kimi-K2-Base
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840,
    "max_position_embeddings": 131072, "rope_theta": 50000.0, "num_nextn_predict_layers": 0, "topk_group": 1,
    "n_group": 1, "routed_scaling_factor": 2.827, "aux_loss_alpha": 0.001, "seq_aux": True,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rope_scaling": DEEPSEEK["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(("name", "published", "active"), [("deepseek-v3", 671e9, 37e9), ("kimi-k2", 1.03e12, 32e9)])
def test_a_models_parameters_are_those_that_were_published(name, published, active):
    shape = shape_of(ModelConfig(name=name))
    outline = outline_of(shape)
    numel = parameters(shape)
    assert numel == pytest.approx(published, rel=0.005)
    assert numel == outline.numel
    # The closed form leaves out the two small norms of latent attention.
    assert float(decoder_of(shape, 4096).parameters) == pytest.approx(numel, rel=1e-6)
    # Heads of 192 numbers for queries and keys, of 128 for values.
    scores = 3 * 2 * 2 * shape.heads * (192 + 128) * shape.layers
    embedding = shape.vocab * shape.width
    assert (model_flops_per_token(shape, 2) - scores) / 6 + embedding == pytest.approx(active, rel=0.03)


def test_the_first_layers_have_a_feed_forward_of_their_own():
    outline = outline_of(SHAPES["deepseek-v3"])
    sizes = [sum(math.prod(each.dims) for each in unit.parameters) for unit in outline.units[1:-1]]
    assert len(set(sizes[:3])) == len(set(sizes[3:])) == 1
    assert sizes[0] - sizes[3] == 3 * 7168 * 18432 - 257 * 3 * 7168 * 2048 - 256 * 7168 - 256
    assert not any("experts" in each.name for each in outline.units[3].parameters)
    assert any("experts" in each.name for each in outline.units[4].parameters)


@pytest.mark.parametrize(("file", "name"), [(DEEPSEEK, "deepseek-v3"), (KIMI, "kimi-k2")], ids=["deepseek", "kimi"])
def test_a_config_json_is_read_as_the_named_model(tmp_path, file, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(file))
    assert shape_of(ModelConfig(name=str(path))) == SHAPES[name]


def test_weights_in_other_blocks_of_fp8_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KIMI | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}}))
    with pytest.raises(ConfigError, match=r"quantization_config = .* is not supported; it must be null"):
        shape_of(ModelConfig(name=str(path)))


def test_an_older_kind_is_read_as_well(tmp_path):
    # deepseek-ai/DeepSeek-V2: 236 billion parameters (DeepSeek-AI 2024, "DeepSeek-V2", sec. 3.1.2).
    path = tmp_path / "config.json"
    older = {
        "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 60, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "vocab_size": 102400,
    }  # fmt: skip
    path.write_text(json.dumps(DEEPSEEK | older))
    assert parameters(shape_of(ModelConfig(name=str(path)), is_priced=True)) == pytest.approx(236e9, rel=0.002)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_rope_head_dim": 32}, ("qk_rope_head_dim = 32", "64")),
        ({"qk_nope_head_dim": 192}, ("qk_nope_head_dim = 192", "128")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq = 2", "1")),
        ({"q_lora_rank": None}, ("q_lora_rank", "whole number")),
        ({"num_hidden_layers": 3}, ("model.layers = 3", "set model.layers to 4")),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else next(iter(value)),
)
def test_what_no_formula_has_is_refused(tmp_path, change, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OLDER | change))
    with pytest.raises(ConfigError) as caught:
        shape_of(ModelConfig(name=str(path)), is_priced=True)
    assert [word for word in words if word not in str(caught.value)] == []


def test_nothing_but_a_price_takes_such_a_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OLDER))
    run = RunConfig(
        model=ModelConfig(name=str(path)),
        data=DataConfig(sequence_tokens=4096),
        train=TrainConfig(batch_sequences=64),
        plan=PlanConfig(dp=8, tp=2, pp=2, ep=8),
    )
    with pytest.raises(ConfigError, match="can price but Superstep cannot train yet") as caught:
        resolve(run)
    assert f"model.name = '{path}'" in str(caught.value)
    assert "'qwen3-30b-a3b'" in str(caught.value)
    resolved = resolve(run, is_priced=True)
    assert resolved.outline.numel == parameters(resolved.shape)
