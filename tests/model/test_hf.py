"""Weights and config.json, to Hugging Face and back: the same logits on both sides."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from superstep.errors import StateError
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import FILE, load_weights, open_weights, save_weights
from superstep.model.files.peft_adapter import read_adapter
from superstep.model.unit import global_tensors, parameters
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.hf_config import from_hf_config, to_hf_config
from superstep.plan.model.hf_styles import STYLES
from superstep.plan.model.rope import LinearRope, Llama3Rope, YarnRope
from superstep.plan.model.shape import Latent, MoeShape
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.model.style import BlockStyle

transformers = pytest.importorskip("transformers")

LLAMA = replace(SHAPES["tiny"], tied=False)
QWEN = replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32, norm_eps=1e-6)
EXPERTS = MoeShape(
    router="dropless",
    experts=6,
    experts_per_token=2,
    shared_experts=0,
    renormalise=True,
    capacity_factor=None,
    balance_weight=0.02,
    z_weight=0.0,
)
MIXTRAL = replace(LLAMA, moe=EXPERTS, ffn=48)
QWEN_MOE = replace(QWEN, moe=EXPERTS, ffn=48)
LONG = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=64)
YARN = YarnRope(
    factor=4.0, original_tokens=32, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=1.1386294361119891
)
OLMO = replace(QWEN, family="llama", head_dim=16, style=STYLES["olmo2"].style)
GEMMA = replace(
    LLAMA,
    family="qwen3",
    tied=True,
    head_dim=32,
    norm_eps=1e-6,
    window=40,
    full_layers=(1,),
    style=STYLES["gemma2"].style,
)
GEMMA2 = replace(GEMMA, style=replace(GEMMA.style, soft_cap=2.0, logit_cap=3.0))
GEMMA3 = replace(GEMMA, qk_norm=True, style=replace(GEMMA.style, local_theta=500.0))
GRANITE = BlockStyle(embedding_scale=6.0, query_scale=0.5, residual_scale=0.25, logit_divisor=3.0)
# A head's first outputs are small: the norm of linear attention divides by them, so a larger eps keeps rounding small.
QWEN35 = replace(
    LLAMA,
    family="qwen3",
    head_dim=32,
    qk_norm=True,
    norm_eps=1e-3,
    full_layers=(1,),
    style=STYLES["qwen3_5_text"].style,
    delta=DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=24),
)
SHARED = replace(EXPERTS, shared_experts=2)
QWEN_NEXT = replace(
    QWEN35, style=STYLES["qwen3_next"].style, moe=SHARED, ffn=48, delta=replace(QWEN35.delta, is_grouped=True)
)
GPT_OSS = replace(
    MIXTRAL,
    family="qwen3",
    qkv_bias=True,
    window=40,
    full_layers=(1,),
    rope_scaling=replace(YARN, truncate=False),
    style=replace(STYLES["gpt_oss"].style, gate_limit=1.5),
)
DEEPSEEK = replace(
    LLAMA,
    family="qwen3",
    layers=3,
    kv_heads=4,
    norm_eps=1e-6,
    ffn=48,
    moe=replace(
        EXPERTS,
        router="sigmoid",
        experts=8,
        shared_experts=2,
        balance_weight=0.0,
        groups=4,
        groups_per_token=2,
        scale=2.5,
    ),
    dense_layers=1,
    dense_ffn=96,
    latent=Latent(query_rank=24, key_rank=40, rotated=8),
)
SHAPES_BY_NAME = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "llama-long": replace(LLAMA, rope_scaling=LONG),
    "llama-linear": replace(LLAMA, rope_scaling=LinearRope(factor=4.0)),
    "llama-yarn": replace(LLAMA, rope_scaling=YARN),
    "llama-yarn-whole": replace(LLAMA, head_dim=64, rope_scaling=replace(YARN, beta_fast=8.0, truncate=False)),
    "mistral": replace(LLAMA, window=40),
    "mistral-short": replace(LLAMA, window=3),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen2-sliding": replace(LLAMA, qkv_bias=True, window=40, tied=True),
    "qwen3": QWEN,
    "qwen3-tied": replace(QWEN, tied=True),
    "qwen3-sliding": replace(QWEN, window=40, rope_scaling=YARN),
    "qwen3-mixed": replace(QWEN, window=40, full_layers=(0,)),
    "mixtral": MIXTRAL,
    "mixtral-sliding": replace(MIXTRAL, window=40),
    "qwen3-moe": QWEN_MOE,
    "qwen3-moe-sliding": replace(QWEN_MOE, window=40),
    "qwen3-moe-tied": replace(QWEN_MOE, moe=replace(EXPERTS, renormalise=False), tied=True),
}
SHAPES_BY_NAME |= {
    "olmo2": OLMO,
    "olmo3": replace(
        OLMO, rope_scaling=YARN, window=40, full_layers=(1,), style=replace(OLMO.style, local_theta=10000.0)
    ),
    "gemma2": GEMMA2,
    "gemma2-plain": replace(GEMMA, tied=False, style=replace(GEMMA.style, query_scale=144**-0.5)),
    "gemma3": GEMMA3,
    "gemma3-long": replace(GEMMA3, rope_scaling=LinearRope(factor=8.0), full_layers=(0,)),
    "gemma3-capped": replace(GEMMA3, full_layers=(), style=replace(GEMMA3.style, logit_cap=3.0, query_scale=0.25)),
    "granite": replace(LLAMA, style=GRANITE),
    "qwen3.5": QWEN35,
    "qwen3.5-tied": replace(QWEN35, full_layers=(0,), tied=True, delta=replace(QWEN35.delta, key_heads=4)),
    "qwen3-next": QWEN_NEXT,
    "qwen3-next-yarn": replace(QWEN_NEXT, full_layers=(0,), rope_scaling=YARN, moe=replace(SHARED, renormalise=False)),
    "gpt-oss": GPT_OSS,
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-yarn": replace(
        DEEPSEEK,
        dense_layers=0,
        rope_scaling=replace(YARN, attention_factor=1.0, score_scale=1.0),
        moe=replace(DEEPSEEK.moe, shared_experts=1, renormalise=False, groups=1, groups_per_token=1),
    ),
    "deepseek-v3-wide-queries": replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, query_rank=None)),
    "gpt-oss-plain": replace(GPT_OSS, rope_scaling=None, window=None, full_layers=(), tied=True),
}
SHAPE = pytest.mark.parametrize("shape", SHAPES_BY_NAME.values(), ids=SHAPES_BY_NAME)

# Both sides compute in fp32 and differ in the order of sums over 64 to 160 products: a few units of 6e-8 of
# hidden states of about 1, through two layers. Measured: up to 4e-6 of logits up to 6.
ATOL = 2e-5

# The same of a gradient, with sums over 192 tokens, of its norm. Measured: up to 2e-6.
GRADIENT_RTOL = 2e-5


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def scrambled(model, shape=LLAMA):
    """Random everywhere, norms included, and large enough that a fault in any part moves the logits."""
    offset = shape.style.norm_offset
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5 - offset, 1.5 - offset)
    return model.eval()


def logits(model, shape):
    tokens = torch.arange(2 * 96).view(2, 96) * 7 % shape.vocab
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def tensors(decoder, shape):
    return global_tensors(decoder, units(shape))


@SHAPE
def test_hugging_face_reads_what_we_save(shape, tmp_path):
    decoder = scrambled(Decoder(shape), shape)
    save_weights(tmp_path, tensors(decoder, shape), shape)
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == to_hf_config(shape)["architectures"][0]
    assert not any(told.values())
    torch.testing.assert_close(logits(decoder, shape), logits(theirs.eval(), shape), rtol=0, atol=ATOL)


@SHAPE
def test_we_read_what_hugging_face_saves(shape, tmp_path):
    config = transformers.AutoConfig.for_model(**to_hf_config(shape))
    theirs = scrambled(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), shape)
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")  # several files and their index
    assert (tmp_path / "model.safetensors.index.json").exists()

    ours = from_hf_config(tmp_path / "config.json")
    decoder = Decoder(ours)
    load_weights(tmp_path, tensors(decoder, ours))
    assert ours == shape
    torch.testing.assert_close(logits(decoder, shape), logits(theirs, shape), rtol=0, atol=ATOL)


@SHAPE
def test_both_sides_have_the_same_gradients(shape, tmp_path):
    if shape.moe is not None:  # the balance loss is a matter of its own: tests/model/test_hf_balance.py
        shape = replace(shape, moe=replace(shape.moe, balance_weight=0.0))
    decoder = scrambled(Decoder(shape), shape)
    save_weights(tmp_path, tensors(decoder, shape), shape)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(2 * 96).view(2, 96) * 7 % shape.vocab
    for model in (decoder, theirs.eval()):
        out = model(tokens)
        out = out if isinstance(out, torch.Tensor) else out.logits
        torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()

    with torch.no_grad():  # their own names for what they call otherwise in memory
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    expected = open_weights(tmp_path / "gradients")
    # Statistics have a load in place of a gradient: tests/model/test_router.py.
    learnt = [(spec, p) for spec, p in parameters(decoder, units(shape)).values() if not spec.is_statistic]
    found = {name: x for spec, p in learnt for name, x in spec.views(p.grad)}
    assert set(found) == {name for name in expected if not name.endswith("e_score_correction_bias")}
    for name, gradient in found.items():
        whole = expected[name][:]
        assert (gradient - whole).norm() <= GRADIENT_RTOL * whole.norm(), name


@SHAPE
def test_the_shape_comes_back_from_our_config(shape, tmp_path):
    save_weights(tmp_path, tensors(Decoder(shape), shape), shape)
    assert from_hf_config(tmp_path / "config.json") == shape


def test_our_weights_come_back_to_the_bit_over_an_older_save(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    first, second = (scrambled(Decoder(LLAMA)).bfloat16() for _ in range(2))
    save_weights(tmp_path, tensors(first, LLAMA), LLAMA)
    load_weights(tmp_path, tensors(second, LLAMA))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_slice_is_read_alone(tmp_path):
    decoder = scrambled(Decoder(LLAMA))
    save_weights(tmp_path, tensors(decoder, LLAMA), LLAMA)
    weights = open_weights(tmp_path)
    stored = weights["model.layers.1.self_attn.o_proj.weight"]
    whole = decoder.block[1].self_attn.o_proj.weight
    assert set(weights) == set(tensors(decoder, LLAMA))
    assert stored.get_shape() == list(whole.shape)
    assert torch.equal(stored[:, 16:32], whole[:, 16:32])
    assert torch.equal(stored[8:24], whole[8:24])


def test_a_tied_checkpoint_may_hold_its_head_twice_but_not_another_head(tmp_path):
    tied = replace(LLAMA, tied=True)
    decoder = scrambled(Decoder(tied))
    twice = {**tensors(decoder, tied), "lm_head.weight": decoder.head.lm_head.weight.detach().clone()}
    save_weights(tmp_path, twice, tied)
    load_weights(tmp_path, tensors(Decoder(tied), tied))

    save_weights(tmp_path, {**twice, "lm_head.weight": torch.zeros(tied.vocab, tied.width)}, tied)
    with pytest.raises(StateError, match=r"lm_head\.weight differs from .* set model\.tied = false"):
        load_weights(tmp_path, tensors(Decoder(tied), tied))


def test_a_foreign_checkpoint_is_told_by_its_first_tensors_and_fills_nothing(tmp_path):
    stored = tensors(Decoder(replace(LLAMA, width=32)), LLAMA)
    stored = {name: x for name, x in stored.items() if "layers.0" not in name} | {"extra": torch.zeros(1)}
    save_weights(tmp_path, stored, LLAMA)
    decoder = Decoder(LLAMA)
    before = {name: x.clone() for name, x in tensors(decoder, LLAMA).items()}
    with pytest.raises(StateError) as caught:
        load_weights(tmp_path, tensors(decoder, LLAMA))
    assert str(caught.value).removeprefix(f"{tmp_path}: ") == (
        "missing: model.layers.0.input_layernorm.weight, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.k_proj.weight and 6 more; "
        "not of this model: extra; "
        "of another shape: model.embed_tokens.weight [512, 32], not [512, 64], "
        "model.layers.1.input_layernorm.weight [32], not [64], "
        "model.layers.1.self_attn.q_proj.weight [64, 32], not [64, 64] and 9 more. "
        "Set model.name to the config.json beside these weights."
    )
    assert all(torch.equal(x, before[name]) for name, x in tensors(decoder, LLAMA).items())


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        (None, "", "has no readable weights"),
        ("model.safetensors", "torn", "is damaged"),
        ("model.safetensors.index.json", "{", "is damaged"),
        ("model.safetensors.index.json", "{}", "is damaged"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "gone.safetensors"}}',
            "has no readable weights",
        ),
    ],
)
def test_a_folder_without_readable_weights_is_an_error_that_names_it(file, content, told, tmp_path):
    if file:
        (tmp_path / file).write_text(content)
    with pytest.raises(StateError, match=told) as caught:
        open_weights(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/model.safetensors", "inner/model.safetensors", "..", ""])
def test_an_index_that_names_files_outside_of_its_folder_is_refused(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for inside in ("other", "model/inner"):
        (tmp_path / inside).mkdir()
        save_file({"a": torch.zeros(2)}, tmp_path / inside / "model.safetensors", {"format": "pt"})
    absolute = str(tmp_path / "other/model.safetensors") if name.startswith("/") else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": absolute}}))
    with pytest.raises(StateError, match=f"index.json names '{absolute}', which is no file beside it"):
        open_weights(folder)


def test_weights_that_are_no_regular_file_are_refused_unopened(tmp_path):
    """A FIFO without a writer would keep who opens it waiting for ever."""
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(StateError, match=rf"{FILE} is no regular file; name a file of weights"):
        open_weights(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to("/dev/zero")
    with pytest.raises(StateError, match="is no regular file"):
        open_weights(tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(StateError, match=r"adapter_config.json is no regular file"):
        read_adapter(tmp_path, {})
