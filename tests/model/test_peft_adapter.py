"""Adapters on disk: what is written is read again, by peft too, and what is not served is refused by name."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import low_rank
from superstep.errors import UserError
from superstep.model.files.peft_adapter import (
    FILE,
    PREFIX,
    A,
    Adapter,
    LoraFactors,
    linears_of,
    read_adapter,
    write_adapter,
)
from superstep.model.files.peft_config import CONFIG

LINEARS = linears_of(low_rank.shape())
Q = "model.layers.{}.self_attn.q_proj"


def odd_one():
    """Ranks and strengths that differ, on some of the linears."""
    plain = low_rank.random_adapter(3, only="self_attn").parts
    small = low_rank.random_adapter(4, rank=2, alpha=1.0, only="layers.1.mlp").parts
    strong = {Q.format(0): LoraFactors(*(plain[Q.format(0)].a, plain[Q.format(0)].b), alpha=9.0)}
    return Adapter(parts=plain | small | strong, is_stabilized=True)


def assert_same(one, other):
    assert one.parts.keys() == other.parts.keys()
    for name, part in one.parts.items():
        assert torch.equal(part.a, other.parts[name].a)
        assert torch.equal(part.b, other.parts[name].b)
        assert one.scale(name) == other.scale(name)


def test_what_is_written_is_read_again(tmp_path):
    made = odd_one()
    write_adapter(tmp_path, made)
    first = read_adapter(tmp_path, LINEARS)
    assert_same(made, first)
    assert {made.scale(Q.format(0)), made.scale(Q.format(1))} == {9.0 / 2, 6.0 / 2}
    write_adapter(tmp_path, made)
    assert read_adapter(tmp_path, LINEARS).version == first.version
    made.parts[Q.format(0)].a[0, 0] += 1
    write_adapter(tmp_path, made)
    assert read_adapter(tmp_path, LINEARS).version != first.version
    assert sorted(file.name for file in tmp_path.iterdir()) == [CONFIG, FILE]


TOKENS = torch.arange(20)[None] * 7 % low_rank.VOCAB


def logits_of(folder, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def test_peft_reads_what_is_written(tmp_path):
    made = odd_one()
    write_adapter(tmp_path / "adapter", made)
    base, merged = low_rank.write_model(tmp_path / "base"), low_rank.write_model(tmp_path / "merged", made)
    ours = logits_of(base, tmp_path / "adapter")
    torch.testing.assert_close(ours, logits_of(merged), rtol=0, atol=2e-4)
    assert (ours - logits_of(base)).abs().max() > 0.1


def test_what_peft_writes_is_read(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(low_rank.write_model(tmp_path / "base"), dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 2},
        alpha_pattern={"down_proj": 3},
        use_rslora=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    found = read_adapter(tmp_path / "adapter", LINEARS)
    assert [found.parts[Q.format(layer)].rank for layer in (0, 1)] == [4, 2]
    assert found.scale("model.layers.0.mlp.down_proj") == 3 / 2
    with torch.no_grad():
        theirs = model.eval()(TOKENS).logits
    merged = logits_of(low_rank.write_model(tmp_path / "merged", found))
    torch.testing.assert_close(theirs, merged, rtol=0, atol=2e-4)


def saved(folder, **fields):
    """An adapter on the queries, with other fields in its configuration."""
    write_adapter(folder, low_rank.random_adapter(1, only="q_proj"))
    config = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["self_attn.q_proj"]},
        {"target_modules": r".*\.self_attn\.q_proj"},
        {"target_modules": "all-linear", "exclude_modules": r".*(mlp|[kvo]_proj).*"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"lora_bias": False, "use_dora": False, "something_new": None, "megatron_core": "megatron.core"},
    ],
)
def test_linears_are_named_in_every_way_of_pefts(tmp_path, fields):
    assert len(read_adapter(saved(tmp_path, **fields), LINEARS).parts) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "LOHA"}, 'peft_type = "LOHA" is not served; LORA is'),
        ({"use_dora": True}, "use_dora = true is not served"),
        ({"bias": "all"}, 'bias = "all" is not served'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"] is not served'),
        ({"lora_bias": True}, "lora_bias = true"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = true"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa" is not served, because it changes'),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"r": 0}, "r = 0 must be a whole number"),
        ({"r": 8}, "q_proj.lora_A.weight' is [4, 32], and must be [8, 32]"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern['q_proj'] = \"x\" must be"),
        ({"lora_alpha": None}, "lora_alpha = null must be a finite number"),
        ({"target_modules": None}, "target_modules is empty"),
        ({"target_modules": "(q_proj"}, "'(q_proj' is no expression"),
        ({"target_modules": ["q_proj", "v_proj"]}, "names model.layers.0.self_attn.v_proj, but the file has no"),
        ({"target_modules": ["v_proj"]}, "no tensors"),
        ({"layers_to_transform": 0, "target_modules": ["q_proj"]}, "tensors of model.layers.1.self_attn.q_proj, which"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, fields, said):
    with pytest.raises(UserError) as told:
        read_adapter(saved(tmp_path, **fields), LINEARS)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def with_tensors(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def put(key, value):
    return lambda tensors: tensors.update({key: value})


KEY = f"{PREFIX}{Q.format(1)}{A}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(KEY, torch.full((4, 32), float("nan"))), "holds NaN"),
        (put(KEY, torch.zeros(4, 31)), "is [4, 31], and must be [4, 32]"),
        (put(KEY, torch.zeros(4, 32, dtype=torch.int8)), "torch.int8"),
        (put(f"{PREFIX}lm_head{A}", torch.zeros(4, 32)), "'base_model.model.lm_head.lora_A.weight' belongs to no"),
        (
            put(f"{PREFIX}model.embed_tokens.lora_embedding_A", torch.zeros(4, 64)),
            "lora_embedding_A' belongs to no",
        ),
        (put(f"{PREFIX}{Q.format(2)}{A}", torch.zeros(4, 32)), "belongs to no linear"),
        (put(f"{PREFIX}model.layers.0.mlp.experts.3.up_proj{A}", torch.zeros(4, 32)), "belongs to no linear"),
        (lambda tensors: tensors.pop(KEY), f"'{KEY}' is missing"),
        (lambda tensors: tensors.clear(), "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, said):
    with_tensors(saved(tmp_path), change)
    with pytest.raises(UserError) as told:
        read_adapter(tmp_path, LINEARS)
    assert said in str(told.value)


def test_what_cannot_be_read_is_told(tmp_path):
    with pytest.raises(UserError, match="holds no adapter"):
        read_adapter(tmp_path, LINEARS)
    saved(tmp_path)
    (tmp_path / FILE).write_bytes(b"\x10" * 40)
    with pytest.raises(UserError, match="is damaged"):
        read_adapter(tmp_path, LINEARS)
    (tmp_path / CONFIG).write_text("[1")
    with pytest.raises(UserError, match="is damaged"):
        read_adapter(tmp_path, LINEARS)
