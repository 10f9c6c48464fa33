"""Every key of every accepted ``config.json``: honoured as transformers does, known to change nothing, or refused.

The keys are those of transformers' own configuration classes, and some that only older files or files of other tools
have. Each is changed alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import cache
from typing import get_args

import pytest
import torch

from longer import longer
from superstep.errors import ConfigError, StateError
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import load_weights, open_weights
from superstep.model.files.peft_config import read_config
from superstep.model.unit import global_tensors
from superstep.plan.config import ModelConfig
from superstep.plan.model.hf_config import OURS, from_hf_config
from superstep.plan.model.hf_families import DEFAULTS, HARMLESS, HARMLESS_IN, ModelType, only
from superstep.plan.model.sizes.lookup import shape_of

transformers = pytest.importorskip("transformers")

FAMILIES = [kind for kind in get_args(ModelType) if kind not in OURS]
FAMILY = pytest.mark.parametrize("kind", FAMILIES)
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LAYER_ROPES = ("olmo3", "gemma3_text")
OF_KIND = {
    "olmo3": SLIDING,
    "gemma2": SLIDING | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": SLIDING | {"final_logit_softcapping": 3.0},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt_oss": SLIDING | MIXTURE | {"swiglu_limit": 0.5},
    "mistral": {"sliding_window": None},
    "mixtral": MIXTURE,
    "qwen3_moe": MIXTURE | {"moe_intermediate_size": 48},
}
LINEAR = ("qwen3_5_text", "qwen3_next")
OFFSET = ("gemma2", "gemma3_text", *LINEAR)
HEADS = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
DELTA = {
    **HEADS,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-3,  # the norm of linear attention divides by small first outputs
}
OF_KIND |= {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2}
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
}
TOKENS = torch.arange(2 * 48).view(2, 48) * 7 % 96
# As in test_hf.py: fp32 on both sides, sums of at most 96 products in another order.
ATOL = 2e-5


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def written(kind, folder, **changes):
    """What transformers saves of a small configuration, read back as a dict, with some keys changed afterwards."""
    transformers.AutoConfig.for_model(kind, **SIZES | OF_KIND.get(kind, {})).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["architectures"] = list(only(kind)["architectures"][0])
    for key, value in changes.items():
        raw[key] = value
        if value is GONE:
            del raw[key]
    (folder / "config.json").write_text(json.dumps(raw))
    return raw


GONE = object()


def theirs_of(config):
    """Transformers' model, with weights that depend on names and dims alone."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator, offset = (
        torch.Generator().manual_seed(1),
        1.0 if config.model_type in OFFSET else 0.0,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5 - offset, 1.5 - offset, generator=generator)
    return model


def logits_of(model):
    with torch.no_grad():
        out = model(TOKENS % model.vocab)
    return out if isinstance(out, torch.Tensor) else out.logits


def theirs_logits(folder):
    return _theirs_logits((folder / "config.json").read_text())


@cache
def _theirs_logits(config):
    """Kept by the file's text: that of the base is asked for again and again."""
    model = theirs_of(transformers.AutoConfig.for_model(**json.loads(config)))
    model.vocab = model.config.vocab_size
    return logits_of(model)


def assert_ours_is_theirs(folder, weights):
    """Our logits of the folder's config.json are transformers'."""
    model = theirs_of(transformers.AutoConfig.from_pretrained(folder))
    config = (folder / "config.json").read_text()
    model.save_pretrained(weights)
    shape = from_hf_config(folder / "config.json")
    ours = Decoder(shape)
    load_weights(weights, global_tensors(ours, units(shape)))
    ours.vocab = model.vocab = shape.vocab
    torch.testing.assert_close(logits_of(ours), logits_of(model), rtol=0, atol=ATOL)
    assert (folder / "config.json").read_text() == config


# How a key is changed where doubling a number or turning a truth value says nothing, or needs another key with it.
SPECIAL = {
    "model_type": {"model_type": "cohere"},
    "architectures": {"architectures": ["LlamaForSequenceClassification"]},
    "transformers_version": {"transformers_version": "4.40.0"},
    "dtype": {"dtype": "bfloat16"},
    "hidden_act": {"hidden_act": "gelu"},
    "attn_logit_softcapping": {"attn_logit_softcapping": 5.0},
    "use_bidirectional_attention": {"use_bidirectional_attention": True},
    "hidden_activation": {"hidden_activation": "gelu"},
    "problem_type": {"problem_type": "regression"},
    "id2label": {"id2label": {"0": "a", "1": "b", "2": "c"}},
    "label2id": {"label2id": {"a": 0}},
    "_name_or_path": {"_name_or_path": "somebody/something"},
    "initializer_range": {"initializer_range": 0.5},
    "rms_norm_eps": {"rms_norm_eps": 0.5},
    "num_hidden_layers": {"num_hidden_layers": 4, "layer_types": GONE},
    "head_dim": {"head_dim": 32},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "sliding_window": {"sliding_window": 8},
    "use_sliding_window": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
        "layer_types": GONE,
    },
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": GONE},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
    "linear_num_key_heads": {"linear_num_key_heads": 1},
    "mlp_only_layers": {"mlp_only_layers": [0]},
    "pad_token_id": {"pad_token_id": 3},
    "bos_token_id": {"bos_token_id": 4},
    "eos_token_id": {"eos_token_id": 5},
}
# What older files have, what transformers takes from any file, and what nobody knows.
BESIDE = {
    "rope_theta": {"rope_theta": 500.0, "rope_parameters": GONE},
    "rope_scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": GONE},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "original_max_position_embeddings": {"original_max_position_embeddings": 16},
    "per_layer_config": {"per_layer_config": {"0": {"sliding_window": 4}}},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "auto_map": {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}},
    "rope_interleaved": {"rope_interleaved": True},
    "logit_scale": {"logit_scale": 0.5},
}
# Honoured, yet nothing that logits show: how training starts, what the loss weighs, how long a sequence may be.
UNSEEN = ("initializer_range", "router_aux_loss_coef", "max_position_embeddings")
UNREAD = ("sliding_window",)  # Qwen's, with use_sliding_window = false


VALUES = {"v_head_dim": 16, "qk_nope_head_dim": 16, "qk_head_dim": 32}
ROTATED = {"qk_rope_head_dim": 32, "head_dim": 32, "qk_head_dim": 64}
OF_DEEPSEEK = {
    "num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 8},
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim"), VALUES),
    **dict.fromkeys(ROTATED, ROTATED),
    "n_group": {"n_group": 1},
    "num_experts_per_tok": {"num_experts_per_tok": 1},
    "first_k_dense_replace": {"first_k_dense_replace": 0},
}


def changed(kind, key, value):
    """The changes that make one key say something else."""
    if kind == "deepseek_v3" and key in OF_DEEPSEEK:
        return OF_DEEPSEEK[key]
    if key == "rope_parameters" and kind in LAYER_ROPES:
        return {key: dict.fromkeys(value, SPECIAL[key][key])}
    if key == "layer_types" and kind in LINEAR:
        return {key: ["full_attention", "linear_attention"]}
    if key in SPECIAL:
        return SPECIAL[key]
    if isinstance(value, bool):
        return {key: not value}
    assert isinstance(value, int | float), f"say in SPECIAL how {key} = {value} is changed"
    return {key: 2 * value or 1}


def verdict(kind, key, changes, tmp_path):
    """What becomes of a key: refused, harmless, honoured, or priced and not trained; and that it is so."""
    base, other, weights = (tmp_path / name for name in ("base", "other", "weights"))
    raw = written(kind, base)
    shape = from_hf_config(base / "config.json")
    changes = {name: value for name, value in changes.items() if value is not GONE or name in raw}
    written(kind, other, **changes)
    try:
        found = from_hf_config(other / "config.json")
    except ConfigError as error:
        found = str(error)
    if isinstance(found, str):
        assert any(name in found for name in changes), f"{key}: {found}"
        return "refused"
    if key in IDS or key in HARMLESS or key in HARMLESS_IN.get(kind, {}):
        assert found == shape
        assert torch.equal(theirs_logits(other), theirs_logits(base)), key
        return "harmless"
    assert_ours_is_theirs(other, weights)
    if found == shape:
        assert key in UNREAD, key
        assert torch.equal(theirs_logits(other), theirs_logits(base)), key
        return "harmless"
    if key not in UNSEEN:
        after, before = theirs_logits(other), theirs_logits(base)
        assert after.shape != before.shape or (after - before).abs().max() > 100 * ATOL, key
    return "honoured"


@pytest.mark.parametrize("kind", longer(FAMILIES, lambda kind: kind not in ("llama", "qwen3_moe")))
def test_every_key_of_transformers_class_is_honoured_harmless_or_refused(kind, tmp_path):
    keys = transformers.AutoConfig.for_model(kind).to_dict()
    keys |= written(kind, tmp_path / "saved") | dict.fromkeys(("head_dim",), 16)
    found = {}
    for number, (key, value) in enumerate(keys.items()):
        found[key] = verdict(kind, key, changed(kind, key, value), tmp_path / str(number))
    honoured = {key for key, what in found.items() if what == "honoured"}
    assert {*REQUIRED, "head_dim", "rms_norm_eps", "rope_parameters", "initializer_range"} - honoured <= (
        {"intermediate_size"} if kind in ("qwen3_moe", "qwen3_next") else set()
    )
    assert {"hidden_activation" if "gemma" in kind else "hidden_act", "attention_dropout"} <= {
        key for key, what in found.items() if what == "refused"
    }
    windowed = ("mistral", "mixtral", "olmo3", "gemma2", "gemma3_text", "gpt_oss")
    assert ("sliding_window" in honoured) == (kind in windowed)
    assert ("use_sliding_window" in honoured) == (kind.startswith("qwen") and kind not in LINEAR)
    assert {key for key in DELTA if key.startswith("linear_")} <= honoured or kind not in LINEAR
    assert ("max_window_layers" in honoured) == (kind in ("qwen2", "qwen3"))


@FAMILY
def test_every_key_from_elsewhere_is_honoured_or_refused(kind, tmp_path):
    found = {key: verdict(kind, key, changes, tmp_path / key) for key, changes in BESIDE.items()}
    honoured = ["rope_theta", *([] if kind in LAYER_ROPES else ["rope_scaling"])]
    assert found == dict.fromkeys(BESIDE, "refused") | dict.fromkeys(honoured, "honoured")
    if kind in LAYER_ROPES:
        named = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": GONE}
        assert verdict(kind, "rope_scaling", named, tmp_path / "named") == "honoured"


def absent(kind):
    """What transformers' class says where a file is silent."""
    config = transformers.AutoConfig.for_model(kind)
    found = {field.name: field.default for field in fields(config)}
    if "num_experts" in found:
        found["num_local_experts"] = found.pop("num_experts")
    ropes = config.rope_parameters
    if kind in LAYER_ROPES:
        found["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    if kind in LINEAR:
        found["partial_rotary_factor"] = ropes["partial_rotary_factor"]
    return found | {"rope_theta": ropes["rope_theta"]}


@FAMILY
def test_what_a_key_means_that_is_left_out_is_what_transformers_has(kind):
    theirs = absent(kind)
    ours = {key: value for key, value in DEFAULTS[kind].items() if key not in IDS}
    # What their class does not have: old names for the same, and a loss of ours.
    spare = {"rope_scaling", "router_z_loss_coef", "sliding_window_pattern", "full_attention_interval"}
    spare |= {"head_dim", "router_aux_loss_coef"} if kind == "deepseek_v3" else set()
    spare |= {"head_dim"} if kind in ("qwen2", "qwen3_moe", "olmo2", "olmo3", "granite") else set()
    assert {key: value for key, value in ours.items() if key not in spare} == {
        key: theirs[key] for key in ours if key not in spare
    }
    says_one_thing = only(kind)
    for key, values in says_one_thing.items():
        if theirs.get(key) is not None:
            assert theirs[key] == values[0], key
    named = {*ours, *REQUIRED, *IDS, *says_one_thing, *HARMLESS, *HARMLESS_IN.get(kind, ())}
    assert set(theirs) <= named


@FAMILY
def test_a_file_of_sizes_alone_is_the_model_that_transformers_makes_of_it(kind, tmp_path):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64) | {
        "vocab_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
    }
    if kind in LINEAR:
        sizes["num_hidden_layers"] = 4
    if kind == "qwen3_next":
        sizes["num_experts"] = sizes.pop("num_local_experts")
    elif kind not in ("mixtral", "qwen3_moe"):
        sizes = {key: sizes[key] for key in REQUIRED}
    elif kind == "mixtral":
        del sizes["moe_intermediate_size"]
    if kind == "deepseek_v3":  # which has three dense layers, and as many key heads as query heads
        sizes |= {"num_hidden_layers": 4, "num_key_value_heads": 32}
    folder = tmp_path / "silent"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    assert_ours_is_theirs(folder, tmp_path / "weights")


ROPES = {
    "default": {"rope_theta": 300.0},
    "linear": {"rope_theta": 300.0, "factor": 4.0},
    "llama3": {
        "rope_theta": 300.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_theta": 300.0,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "attention_factor": 1.5,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    "proportional": {"factor": 2.0},
}
MORE = [
    ("yarn", {"attention_factor": None, "mscale": 1.5, "mscale_all_dim": 0.5}),
    ("yarn", {"attention_factor": None}),
    ("yarn", {"truncate": False}),
    ("yarn", {"factor": None}),
    ("yarn", {"beta_fast": None, "beta_slow": None}),
    ("llama3", {"original_max_position_embeddings": None}),
    ("default", {"partial_rotary_factor": 0.5}),
    ("default", {"mrope_section": [2, 3, 3]}),
]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_every_key_of_the_rotary_embedding_is_honoured_or_refused(kind, tmp_path):
    """Each kind, then each of its numbers doubled, then what may be left out."""
    tries = [(rope, {}) for rope in ROPES]
    tries += [(rope, {key: 2 * value}) for rope in list(ROPES)[:4] for key, value in ROPES[rope].items()]
    found = {}
    for number, (rope, change) in enumerate([*tries, *MORE]):
        values = {"rope_type": rope, **ROPES[rope], **change}
        values = {key: value for key, value in values.items() if value is not None or key == "factor"}
        found[rope, *change] = verdict(kind, "rope_parameters", {"rope_parameters": values}, tmp_path / str(number))
    refused = {key for key, what in found.items() if what == "refused"}
    assert refused == {
        ("dynamic",),
        ("longrope",),
        ("proportional",),
        ("default", "partial_rotary_factor"),
        ("default", "mrope_section"),
    }


HOSTILE = {
    "hidden_size": (2**62, "vocab x width is 4.4e.20 numbers"),
    "vocab_size": (10**12, "model.vocab = 1000000000000 is beyond"),
    "num_hidden_layers": (10**5, "num_hidden_layers = 100000 is beyond"),
    "num_attention_heads": (2**40, "model.heads = 1099511627776 is beyond"),
    "intermediate_size": (10**15, "ffn x width x experts is"),
    "head_dim": (2**50, "heads x head_dim x width is"),
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("key", HOSTILE)
def test_a_number_that_no_machine_trains_is_refused_before_anything_is_made_of_it(key, kind, tmp_path):
    value, rule = HOSTILE[key]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | {"model_type": kind} | OF_KIND.get(kind, {}) | {key: value}))
    with pytest.raises(ConfigError, match=rule):
        shape_of(ModelConfig(name=str(path)))


def test_experts_beyond_measure_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | {"model_type": "mixtral"} | MIXTURE | {"num_local_experts": 10**9}))
    with pytest.raises(ConfigError, match=r"model\.experts = 1000000000 is beyond"):
        shape_of(ModelConfig(name=str(path)))


def test_layers_of_the_command_line_are_held_to_the_same_bound():
    with pytest.raises(ConfigError, match=r"100000 is beyond the limit; set model\.layers to 2048"):
        shape_of(ModelConfig(name="demo", layers=100_000))


READERS = {
    "config.json": lambda path: shape_of(ModelConfig(name=str(path))),
    "model.safetensors.index.json": lambda path: open_weights(path.parent),
    "adapter_config.json": lambda path: read_config(path.read_bytes(), path),
}


@pytest.mark.parametrize("file", READERS)
def test_json_that_nests_without_end_is_refused_in_one_line(file, tmp_path):
    path = tmp_path / file
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises((ConfigError, StateError), match=re.escape(str(tmp_path))) as refused:
        READERS[file](path)
    assert "\n" not in str(refused.value)
