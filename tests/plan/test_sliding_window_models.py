"""Models some of whose layers see a window: gpt-oss by name and by file, and the price of what each layer sees."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from superstep.cost.closed.estimate import estimate
from superstep.cost.closed.framework import Software, price_of
from superstep.cost.closed.model_numbers import array, decoder_of
from superstep.cost.closed.parallel_degrees import Layout
from superstep.cost.program.flops import model_flops_per_token, parameters
from superstep.errors import ConfigError
from superstep.hardware.catalogue import chip
from superstep.hardware.network import usual_cluster
from superstep.plan.config import ModelConfig
from superstep.plan.model.axes import outline_of
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.model.sizes.named_sizes import SHAPES

KINDS = ["sliding_attention", "full_attention"]
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64,
    "hidden_size": 2880, "intermediate_size": 2880, "layer_types": KINDS * 18, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "num_local_experts": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088, "experts_per_token": 4, "initial_context_length": 4096,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """The shape of a config.json, as it is priced."""

    def read(raw):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return shape_of(ModelConfig(name=str(path)))

    return read


def attention_s(shape, tokens):
    """Seconds of a step's attention, forward: what full recomputation of it alone adds."""
    plain = {
        name: array(1) for name in ("dp", "tp", "pp", "cp", "ep", "shards", "chunks", "microbatch", "microbatches")
    }
    none = {name: array(0) for name in ("zero", "sequence_parallel", "schedule", "recompute", "offload")}
    layout = Layout(**plain, **none, recomputed_layers=array(1))
    price = price_of(usual_cluster(chip("H100"), 8), Software())
    slow, fast = (
        estimate(decoder_of(shape, tokens), layout, replace(price[0], attention_forward=share), price[1]).compute_s
        for share in (price[0].attention_forward, 2 * price[0].attention_forward)
    )
    return 2 * float(slow - fast)


@pytest.mark.parametrize(("name", "published"), [("gpt-oss-120b", 116.83e9), ("gpt-oss-20b", 20.91e9)])
def test_a_models_parameters_are_those_that_were_published(name, published):
    assert parameters(SHAPES[name]) == outline_of(SHAPES[name]).numel == pytest.approx(published, rel=0.0003)


def test_a_config_json_is_read_as_the_named_model(read):
    assert read(GPT_OSS) == SHAPES["gpt-oss-120b"]
    assert read(GPT_OSS | {"layer_types": [*KINDS[:1] * 35, KINDS[1]]}).full_layers == (35,)
    with pytest.raises(ConfigError, match="experts_per_token = 2 is not supported; it must be 4"):
        read(GPT_OSS | {"experts_per_token": 2})
    with pytest.raises(ConfigError, match=r"quantization_config = .* is not supported"):
        read(GPT_OSS | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ConfigError, match="each must be 'full_attention' or 'sliding_attention'"):
        read(GPT_OSS | {"layer_types": ["linear_attention"] * 36})


def test_a_layer_costs_what_it_sees(read):
    model, tokens = SHAPES["qwen2.5-7b"], 8192
    raw = to_hf_config(model) | {"use_sliding_window": True, "sliding_window": 1024, "layer_types": None}
    full, mixed, slid = (read(raw | {"max_window_layers": first}) for first in (28, 7, 0))
    assert full == model
    assert (mixed.window, mixed.full_layers, slid.full_layers) == (1024, tuple(range(7)), ())
    whole, some, few = (attention_s(shape, tokens) for shape in (full, mixed, slid))
    # Of the causal half's pairs a window of an eighth leaves 2/8 - 1/64.
    assert few == pytest.approx((2 / 8 - 1 / 64) * whole)
    assert some == pytest.approx(7 / 28 * whole + 21 / 28 * few)
    flops = [model_flops_per_token(shape, tokens) for shape in (full, mixed, slid)]
    assert flops[1] - flops[2] == pytest.approx(7 / 28 * (flops[0] - flops[2]))


def test_more_layers_keep_the_share_that_slide():
    shapes = [shape_of(ModelConfig(name="gpt-oss-20b", layers=layers)) for layers in (6, 1)]
    assert [(shape.layers, shape.full_layers) for shape in shapes] == [(6, (1, 3, 5)), (1, (0,))]
