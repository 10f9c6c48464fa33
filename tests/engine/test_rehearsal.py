"""Operations read off real modules: their FLOPs are torch's own count, formulas agree, and memory is what is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import small
from longer import longer
from superstep.comm.device import Device
from superstep.cost.program.buffers import has_fused_loss
from superstep.cost.program.flops import local_dims
from superstep.cost.program.gradient_flow import trains_table
from superstep.cost.program.lora import list_adapted_linears
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.operation import (
    AttentionOperation,
    CollectiveOperation,
    MatmulOperation,
    MemoryOperation,
    collect,
    flops,
)
from superstep.cost.program.time.unit_operations import decoder_operations
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.tracing.trace_units import operations_of
from superstep.kernels import cpu_library
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.plan.config import LoraConfig, ModelConfig
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.resolution.resolve import resolve
from superstep.plan.sample_fields import Field, SampleFields
from superstep.plan.sharding.unit_flops import count_visible_tokens, feed_forward, whole_matrices
from superstep.plan.trained_parts import FreezeConfig
from superstep.train.weights.model import units_of

LAYOUTS = [
    {},
    {"qk_norm": False, "tied": False, "compute": "bf16"},
    {"kv_heads": 2},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False, "kv_heads": 2},
    {"tp": 2, "vocab": 61, "tied": False, "sequence_parallel": False},
    {"dp": 2, "zero": 2, "recompute": "selective"},
    {"cp": 2, "context": "ulysses"},
    {"lora": ("all-linear",)},
    {"lora": ("q_proj", "o_proj"), "tp": 2, "dp": 2, "zero": 3},
    {"freeze": ("model.embed*", "model.layers.0.*"), "tied": False},
    {"freeze": ("model.embed*", "*.self_attn.*"), "tp": 2, "tied": False},
    {"experts": 4, "experts_per_token": 2, "dp": 2, "ep": 2, "shared_experts": 1},
    {"experts": 4, "router": "noisy-topk", "experts_per_token": 2, "tp": 2},
]
MORE = [
    {"tp": 2, "rules": (("ffn", "none"), ("vocab", "none"))},
    {"tp": 2, "vocab": 61},
    {"lora": ("down_proj",), "tp": 2, "sequence_parallel": False, "tied": False, "vocab": 61},
    {"lora": ("gate_proj", "v_proj"), "tp": 2, "rules": (("ffn", "none"), ("vocab", "none")), "dp": 2, "zero": 2},
    {"lora": ("all-linear",), "cp": 2, "context": "ulysses", "recompute": "selective"},
    {"freeze": ("model.embed*", "*norm.weight", "*.q_proj.*", "*.k_proj.*", "*up_proj*", "lm_head.*"), "tied": False},
    {"freeze": ("model.embed*", "model.layers.*norm.weight", "*.self_attn.*", "*gate*"), "tp": 2, "compute": "bf16"},
    {"freeze": ("model.layers.1.*",), "dp": 2, "zero": 2, "sequence_parallel": False, "tp": 2},
    {"experts": 4, "experts_per_token": 2},
]
"""Every setting of these is met above, and adapters, experts and vocabularies that tp does not divide with tp."""
EVERY = longer([*LAYOUTS, *MORE], MORE.__contains__)
FEW_RECOMPUTE = [each for each in [*LAYOUTS, *MORE] if each.get("recompute") != "selective"]
OF_MODEL = ("vocab", "kv_heads", "experts", "experts_per_token", "shared_experts", "router")


def run_of(**layout):
    model = {name: layout.pop(name) for name in OF_MODEL if name in layout}
    targets, frozen = layout.pop("lora", None), layout.pop("freeze", None)
    # Plain torch, whatever a machine has a compiler for.
    config = small.config(**{"layers": 2, "microbatch": 2, "kernels": "torch"} | layout)
    lora = LoraConfig(rank=3, targets=targets) if targets else None
    freeze = FreezeConfig(params=frozen) if frozen else None
    return resolve(replace(config, model=replace(config.model, **model), lora=lora, freeze=freeze))


@pytest.fixture(scope="module")
def rehearsed():
    """A layout's run and what is seen of it, once for all that is asked of both."""
    found = {}

    def of(layout):
        if str(layout) not in found:
            run = run_of(**layout)
            found[str(layout)] = run, operations_of(run, units_of(run))
        return found[str(layout)]

    return of


def forward_flops(run):
    """Operations of each unit's forward pass over one microbatch on one tensor-parallel rank, in model order."""
    d = local_dims(run)
    shape = run.shape
    tokens = count_visible_tokens(shape, 0, d.S)
    attention = 2 * d.T * d.D * (d.N + 2 * d.K) * d.H + 2 * d.T * d.N * d.H * d.D + 4 * d.T * tokens * d.N * d.H
    inner = 6 * d.Tf * d.D * d.F
    if shape.moe:
        experts = shape.moe.experts_per_token * (feed_forward(shape) + shape.width)
        inner = 2 * d.m * (whole_matrices(shape) + experts)
    block = attention + inner
    return 0, *[block] * shape.layers, 2 * d.Tv * d.D * d.V


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_the_forward_of_every_unit_has_the_flops_of_the_formulas(rehearsed, layout):
    run, seen = rehearsed(layout)
    # A fused head makes its two gradients in the forward pass; a frozen one has one.
    gradients = 2 if trains_table(run, len(run.outline.units) - 1) else 1
    embed, *blocks, head = forward_flops(run)
    factors = sum(one.forward_flops for one in list_adapted_linears(run))
    expected = [embed, *(block + factors for block in blocks), head * (1 + gradients if has_fused_loss(run) else 1)]
    assert [flops(unit.forward) for unit in seen] == expected
    assert [flops(unit.forward) for unit in decoder_operations(run)] == expected


def test_exact_mode_is_rehearsed_as_fast_mode():
    run = run_of(tp=2)
    exact = replace(run.config, numerics=replace(run.config.numerics, exact=True))
    assert operations_of(resolve(exact), units_of(run)) == operations_of(run, units_of(run))


@pytest.mark.parametrize("layout", longer(FEW_RECOMPUTE, MORE.__contains__), ids=str)
def test_every_unit_keeps_the_bytes_of_the_formulas(rehearsed, layout):
    run, units_seen = rehearsed(layout)
    for seen, sizes in zip(units_seen, unit_bytes(run), strict=True):
        assert seen.kept_bytes == pytest.approx(sizes.kept_all, rel=0.01)
        assert seen.between_bytes >= 0
        assert seen.peak_bytes + seen.input_bytes >= seen.kept_bytes


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2, "compute": "bf16"}, {"experts": 4, "shared_experts": 1}, {"recompute": "selective"}, {"window": 12}],
    ids=str,
)
def test_what_kernels_keep_is_that_of_the_formulas(layout, tmp_path):
    if cpu_library.compile_library().library is None:
        pytest.skip(cpu_library.compile_library().why)
    run = run_of(kernels="auto", **{name: value for name, value in layout.items() if name != "window"})
    if "window" in layout:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(to_hf_config(replace(run.shape, head_dim=16, window=layout["window"]))))
        run = resolve(replace(run.config, model=ModelConfig(name=str(path))))
    run, plain = with_kept(run, Device("cpu")), run
    for seen, sizes in zip(operations_of(run, units_of(run)), unit_bytes(run), strict=True):
        expected = sizes.kept_selective if run.plan.recompute == "selective" else sizes.kept_all
        assert seen.kept_bytes == pytest.approx(expected, rel=0.01)
    if run.plan.recompute == "none":
        assert unit_bytes(run)[1].kept_all < 0.98 * unit_bytes(plain)[1].kept_all


def test_kernels_keep_no_silu_and_do_fewer_passes():
    if cpu_library.compile_library().library is None:
        pytest.skip(cpu_library.compile_library().why)
    plain, ours = (operations_of(run, units_of(run))[1] for run in (run_of(), run_of(kernels="auto")))
    run = run_of()
    silu_bytes = 4 * run.plan.microbatch * run.config.data.sequence_tokens * run.shape.ffn
    assert plain.kept_bytes - ours.kept_bytes == silu_bytes
    for way in ("forward", "backward"):
        assert len(getattr(ours, way)) < len(getattr(plain, way))
        assert sum(o.bytes for o in getattr(ours, way) if isinstance(o, MemoryOperation)) < sum(
            o.bytes for o in getattr(plain, way) if isinstance(o, MemoryOperation)
        )


@pytest.mark.parametrize("layout", [{}, {"lora": ("q_proj", "o_proj", "down_proj")}], ids=str)
def test_selective_recomputation_keeps_less_and_does_no_product_again(layout):
    plain, selective = (run_of(recompute=recompute, **layout) for recompute in ("none", "selective"))
    all_kept, few_kept = (operations_of(run, units_of(run))[1] for run in (plain, selective))
    assert few_kept.kept_bytes == pytest.approx(unit_bytes(selective)[1].kept_selective, rel=0.01)
    assert few_kept.kept_bytes < all_kept.kept_bytes

    def large(way):
        return [o for o in way if isinstance(o, MatmulOperation | AttentionOperation)]

    assert sum(o.count for o in few_kept.backward) > sum(o.count for o in all_kept.backward)
    assert flops(large(few_kept.backward)) == flops(large(all_kept.backward))


class Mixer(torch.nn.Module):
    """A module of nobody's: a convolution over positions and two linears."""

    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


def test_a_module_of_ones_own_has_the_flops_that_torch_counts():
    modules = [torch.nn.Embedding(64, 24), Mixer(24), Mixer(24), torch.nn.Linear(24, 64)]
    specs = as_units(modules)
    config = small.config(layers=2, microbatch=2, qk_norm=False)
    run = replace(resolve(config, None, outline_of(specs, "here")), decoder=None)
    seen = operations_of(run, specs)
    for number, (module, unit) in enumerate(zip(modules, seen, strict=True)):
        x = torch.zeros(2, 16, dtype=torch.long) if number == 0 else torch.zeros(2, 16, 24, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y = module(x)
        assert flops(unit.forward) == counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        assert flops(unit.backward) == counter.get_total_flops()
        assert number == 0 or flops(unit.backward) == 2 * flops(unit.forward)


def test_attention_counts_as_torch_does():
    q, k = (3, 4, 32, 8), (3, 4, 48, 8)
    attention = AttentionOperation(heads=12, queries=32, keys=48, head_dim=8)
    assert attention.flops == sdpa_flop_count(q, k, k)


def test_equal_operations_are_counted_together():
    product, view = MatmulOperation(rows=2, width=3, inner=4), MemoryOperation(kernel="view", bytes=0)
    send = CollectiveOperation(collective="send", axis="cp", bytes=8)
    found = collect([product, view, replace(product, count=2), send, view])
    assert found == (replace(product, count=3), replace(view, count=2), send)
    assert flops(found) == 3 * 2 * 2 * 3 * 4


@pytest.mark.parametrize("plan", [{}, {"cp": 2}, {"cp": 2, "context": "ulysses"}, {"recompute": "selective"}], ids=str)
def test_documents_count_as_if_each_sequence_was_one(plan):
    plain, masked = (
        [attention for unit in operations_of(run, units_of(run)) for attention in _attention(unit)]
        for run in (resolve(small.config(layers=2, masked=masked, **{"dp": 1} | plan)) for masked in (False, True))
    )
    assert masked == plain
    assert masked


def _attention(unit):
    every = (*unit.forward, *unit.backward)
    return [operation for operation in every if isinstance(operation, AttentionOperation)]


def test_a_transposed_weight_is_no_memory_of_its_own():
    """A linear's product takes its weight as a view."""
    wide = torch.nn.Sequential(torch.nn.Linear(512, 384), torch.nn.ReLU())
    specs = as_units([wide, torch.nn.Linear(384, 3)])
    run = resolve(small.config(sequences=4, microbatch=4), outline=outline_of(specs, "own"))
    fields = (Field("pixels", (512,), "float32"), Field("target", (), "int64"))
    first, _ = operations_of(replace(run, samples=SampleFields(fields=fields, reads="pixels")), specs)
    assert first.peak_bytes == 2 * first.output_bytes == 2 * 4 * 384 * 4
