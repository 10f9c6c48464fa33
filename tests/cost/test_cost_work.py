"""Parameters and operations: held against the modules themselves, torch's own counter, and published sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from superstep.cost.program.flops import local_dims, model_flops_per_token, parameters, unit_parameters, unit_work
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.mixture.expert_dispatch import LocalDispatch
from superstep.model.moe import MixtureOfExperts
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import resolve

TINY = SHAPES["tiny"]
QWEN = replace(TINY, family="qwen3", qk_norm=True, tied=False, head_dim=32)
BIASED = replace(TINY, qkv_bias=True)
SHAPE = pytest.mark.parametrize("shape", [TINY, QWEN, BIASED], ids=["llama", "qwen3", "qwen2"])
B, S = 3, 32


def counted(work):
    """Operations by kind of product, as torch counts them. On meta tensors attention is two batched products."""
    with FlopCounterMode(display=False) as counter:
        work()
    flops = Counter()
    for op, count in counter.get_flop_counts().get("Global", {}).items():
        flops[str(op).removeprefix("aten.")] += count
    return flops


def meta_units(shape):
    with torch.device("meta"):
        return [unit.build() for unit in units(shape)]


@SHAPE
def test_each_units_forward_is_what_torch_counts(shape):
    tokens = torch.zeros(B, S, dtype=torch.long, device="meta")
    stream = torch.zeros(B, S, shape.width, device="meta")
    work = unit_work(shape, tokens=B * S, sequence_tokens=S)
    assert len(work) == shape.layers + 2
    for number, (unit, module) in enumerate(zip(work, meta_units(shape), strict=True)):
        flops = counted(lambda module=module, number=number: module(stream if number else tokens))
        assert unit.forward_flops == sum(flops.values())
    attention = 4 * B * S * S * shape.heads * shape.head_dim
    assert counted(lambda: meta_units(shape)[1](stream))["bmm"] == attention


@SHAPE
def test_training_on_a_token_is_what_torch_counts_forward_and_backward(shape):
    with torch.device("meta"):
        decoder = Decoder(shape)
    tokens = torch.zeros(B, S, dtype=torch.long, device="meta")
    flops = counted(lambda: decoder(tokens).sum().backward())
    assert model_flops_per_token(shape, S) * B * S == sum(flops.values())


@SHAPE
def test_parameters_are_those_of_the_modules(shape):
    with torch.device("meta"):
        decoder = Decoder(shape)
    assert parameters(shape) == sum(p.numel() for p in decoder.parameters())
    owned = unit_parameters(shape)
    for number, module in enumerate(meta_units(shape)):
        biases = sum(p.numel() for name, p in module.named_parameters() if name.endswith(".bias"))
        matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1) + biases
        is_borrowed = shape.tied and number == shape.layers + 1
        assert owned[number].matrices == (0 if is_borrowed else matrices)
        assert owned[number].vectors == sum(p.numel() for p in module.parameters() if p.dim() == 1) - biases


# Every token counts its k experts, whatever the router; products over rows that depend on data need real tensors.
MIXTURES = [
    replace(TINY, moe=shape_of(ModelConfig(name="tiny", experts=6, router=router, **more)).moe)
    for router, more in [
        ("dropless", {"experts_per_token": 3, "shared_experts": 2}),
        ("switch", {"capacity_factor": 9.0}),
        ("top2", {"capacity_factor": 9.0}),
        ("noisy-topk", {}),
    ]
]
MIXTURE = pytest.mark.parametrize("shape", MIXTURES, ids=lambda shape: shape.moe.router)


@MIXTURE
def test_a_mixtures_forward_is_what_torch_counts(shape):
    mlp = MixtureOfExperts(shape, 0)
    x = torch.randn(B, S, shape.width)
    forward = sum(counted(lambda: mlp(x, exchange=LocalDispatch())).values())
    dense = replace(shape, moe=None, ffn=0)
    rest = unit_work(dense, tokens=B * S, sequence_tokens=S)[1].forward_flops
    block = unit_work(shape, tokens=B * S, sequence_tokens=S)[1]
    assert block.forward_flops == forward + rest


@MIXTURE
def test_parameters_of_a_mixture_are_those_of_its_module(shape):
    mlp = MixtureOfExperts(shape, 0)
    block = unit_parameters(shape)[1]
    experts = sum(p.numel() for p in mlp.experts.parameters())
    assert block.experts == experts
    assert block.whole == sum(p.numel() for p in mlp.parameters()) - experts
    with torch.device("meta"):
        assert parameters(shape) == sum(p.numel() for p in Decoder(shape).parameters())
    assert block.on_rank(tp=2, ep=3) == block.matrices // 2 + block.whole + block.vectors + experts // 3


def test_a_token_costs_what_its_experts_cost():
    """Mixtral has 47 billion parameters and computes with 13 billion (Jiang 2024, sec. 2.1)."""
    shape = SHAPES["mixtral-8x7b"]
    dense = model_flops_per_token(replace(shape, moe=None, ffn=2 * shape.ffn), 4096)
    router = 6 * shape.layers * (8 * shape.width + 2 * shape.width)
    assert model_flops_per_token(shape, 4096) == dense + router
    active = parameters(replace(shape, moe=None, ffn=2 * shape.ffn))
    assert (round(parameters(shape) / 1e9), round(active / 1e9)) == (47, 13)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_named_sizes_have_the_published_number_of_parameters(name, count):
    assert parameters(SHAPES[name]) == count


def test_the_rule_of_six_holds_for_a_large_model():
    """6 operations for each parameter of a product and token, and attention's 12·L·S·N·H on top."""
    shape = SHAPES["llama3-8b"]
    products = parameters(shape) - shape.vocab * shape.width - (2 * shape.layers + 1) * shape.width
    attention = 12 * shape.layers * 8192 * shape.heads * shape.head_dim
    assert model_flops_per_token(shape, 8192) == 6 * products + attention


@SHAPE
def test_tensor_parallel_ranks_share_the_work_and_the_matrices_evenly(shape):
    whole = unit_work(shape, tokens=B * S, sequence_tokens=S)
    part = unit_work(shape, tokens=B * S, sequence_tokens=S, tp=2)
    assert [2 * unit.forward_flops for unit in part] == [unit.forward_flops for unit in whole]
    for unit in unit_parameters(shape):
        assert 2 * unit.on_rank(2) == unit.on_rank(1) + unit.vectors


def test_backward_is_twice_the_forward():
    block = unit_work(TINY, tokens=B * S, sequence_tokens=S)[1]
    assert block.backward_flops == 2 * block.forward_flops


def test_a_rank_of_a_split_sequence_has_its_share_of_heads_and_of_the_stream():
    config = RunConfig(
        model=ModelConfig(name="tiny"),
        data=DataConfig(sequence_tokens=S),
        train=TrainConfig(batch_sequences=4),
        plan=PlanConfig(tp=2, microbatch=2),
    )
    d = local_dims(resolve(config))
    assert (d.T, d.t, d.S) == (2 * S, S, S)
    assert (d.D, d.N, d.K, d.H, d.F, d.V) == (64, 2, 1, 16, 80, 256)
    whole = replace(config, plan=replace(config.plan, sequence_parallel=False))
    assert local_dims(resolve(whole)).t == 2 * S
