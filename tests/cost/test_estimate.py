"""The closed form of a step: its parts, its bounds, and what it must agree with."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.cost.closed.activations import dense_layer
from superstep.cost.closed.block import block_seconds
from superstep.cost.closed.constants import CONSTANTS
from superstep.cost.closed.efficiency import FITTED, GENERATIONS
from superstep.cost.closed.estimate import Estimate, estimate
from superstep.cost.closed.framework import SUPERSTEP, Software, price_of, stack_fields
from superstep.cost.closed.framework_arrays import Stack
from superstep.cost.closed.framework_memory import megatron
from superstep.cost.closed.kernels import attention_s, product_s
from superstep.cost.closed.model_numbers import DecoderNumbers, array, decoder_of
from superstep.cost.closed.parallel_degrees import RECOMPUTE, SCHEDULES, Layout
from superstep.cost.closed.rates import ChipRates
from superstep.cost.program.flops import model_flops_per_token, parameters
from superstep.errors import ConfigError
from superstep.hardware.catalogue import chip
from superstep.hardware.collectives import RankGroup, all_reduce_s
from superstep.hardware.network import usual_cluster
from superstep.plan.model.sizes.named_sizes import SHAPES

CLUSTER = usual_cluster(chip("A100"), 64)
RATES, STACK = price_of(CLUSTER, Software())


def layout(**over: float) -> Layout:
    plain = {
        "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "shards": 1, "zero": 0, "sequence_parallel": 0, "chunks": 1,
        "schedule": 0, "microbatch": 1, "microbatches": 16, "recompute": 0, "recomputed_layers": 1, "offload": 0,
    }  # fmt: skip
    return Layout(**{name: array(value) for name, value in {**plain, **over}.items()})


def step(shape: str = "llama3-8b", *, rates: ChipRates = RATES, stack: Stack = STACK, **over: float) -> Estimate:
    return estimate(decoder_of(SHAPES[shape], 2048), layout(**over), rates, stack)


@pytest.mark.parametrize("name", SHAPES)
def test_a_decoder_has_the_parameters_of_its_shape(name):
    shape = SHAPES[name]
    # The closed form leaves out norms of single heads, but counts one over all of them.
    attending = len(shape.full_layers) if shape.delta else shape.layers
    heads = 2 * shape.head_dim * attending if shape.qk_norm and not shape.style.wide_qk_norm else 0
    if shape.latent is not None and shape.moe is not None:  # nor has it those of narrow widths, and no bias of a router
        heads = shape.layers * (shape.latent.query_rank + shape.latent.key_rank)
        heads += (shape.layers - shape.dense_layers) * shape.moe.experts
    assert decoder_of(shape, 2048).parameters == parameters(shape) - heads


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_a_product_takes_at_least_its_operations_and_its_bytes(rows, columns, inner):
    seconds = product_s(array(rows), array(columns), array(inner), RATES.product_flops_per_s, RATES)
    assert seconds >= 2 * rows * columns * inner / RATES.product_flops_per_s
    assert seconds >= 2 * (rows * inner + inner * columns) / RATES.memory_bytes_per_s


def test_one_tile_more_than_a_wave_costs_another_wave():
    cores = int(RATES.cores)
    full = product_s(array(256 * cores), array(128), array(4096), RATES.product_flops_per_s, RATES)
    more = product_s(array(256 * cores + 256), array(128), array(4096), RATES.product_flops_per_s, RATES)
    assert more / full > 1.2


def test_a_kernel_that_keeps_the_scores_is_slower_and_more_so_for_long_sequences():
    def seconds(attention: str, tokens: int) -> float:
        rates, stack = price_of(CLUSTER, replace(Software(), attention=attention))
        dims = (array(32), array(tokens), array(tokens), array(128))
        return float(sum(attention_s(*dims, rates, stack)))

    short = seconds("fused-softmax", 1024) / seconds("flash-2", 1024)
    long = seconds("fused-softmax", 8192) / seconds("flash-2", 8192)
    assert short > 1
    assert long >= short
    assert seconds("eager", 2048) > seconds("fused-softmax", 2048)
    assert seconds("flash-1", 2048) > seconds("flash-2", 2048)


@pytest.mark.parametrize("shape", ["llama3-8b", "llama3-70b", "qwen3-30b-a3b"])
def test_no_step_is_faster_than_its_operations_at_the_published_peak(shape):
    found = step(shape)
    flops = model_flops_per_token(SHAPES[shape], 2048) * 2048 * 16
    # Attention counts the whole square there, fused kernels half of it.
    assert found.step_s > 0.8 * flops / 312e12


def test_parts_are_not_negative_and_make_up_the_step():
    found = step(dp=2, tp=4, pp=4, chunks=2, schedule=SCHEDULES.index("interleaved"), zero=1, shards=2)
    parts = [getattr(found, field.name) for field in fields(found)]
    assert all(part >= 0 for part in parts)
    assert found.step_s == pytest.approx(sum(parts))


def test_what_a_plan_does_not_have_costs_nothing():
    found = step()
    assert found.tensor_s == found.context_s == found.experts_s == found.transfers_s == 0
    assert found.data_s == found.bubble_s == found.recompute_s == 0
    assert step(tp=2).tensor_s > 0
    assert step(cp=2).context_s > 0
    assert step("qwen3-30b-a3b", ep=8, dp=8).experts_s > 0
    assert step(pp=2).transfers_s > 0
    assert step(dp=2).data_s > 0
    assert step(recompute=RECOMPUTE.index("full")).recompute_s > 0


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 64])
def test_the_bubble_is_the_papers_where_all_ranks_do_the_same(pp, microbatches):
    # Narayanan 2021, sec. 2.2: (p - 1) / m of the ideal time, divided by the chunks.
    alike = replace(decoder_of(SHAPES["llama3-8b"], 2048), vocab=array(1))
    parts = layout(pp=pp, microbatches=microbatches)
    found = estimate(alike, parts, RATES, STACK)
    ideal = found.compute_s
    assert found.bubble_s / ideal == pytest.approx((pp - 1) / microbatches, rel=0.02)
    two = estimate(alike, replace(parts, chunks=array(2), schedule=array(2)), RATES, STACK)
    assert two.bubble_s == pytest.approx(found.bubble_s / 2, rel=1e-6)


def test_zero_bubble_schedules_idle_less():
    idle = [step(pp=4, schedule=SCHEDULES.index(name)).bubble_s for name in ("1f1b", "zb-h1", "zb-v", "zb-2p")]
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] == 0


def test_full_recomputation_is_one_more_forward_pass():
    # A backward pass is two forward passes, so a third more, but for head, attention and launches.
    found = step(recompute=RECOMPUTE.index("full"))
    assert 0.25 < found.recompute_s / found.compute_s < 0.36
    assert 0 < step(recompute=RECOMPUTE.index("selective")).recompute_s < found.recompute_s


def test_frozen_weights_have_no_gradients_of_their_own():
    model = decoder_of(SHAPES["llama3-8b"], 2048)
    whole, adapters = (estimate(replace(model, frozen=array(frozen)), layout(dp=8), RATES, STACK) for frozen in (0, 1))
    assert 0.6 < adapters.step_s / whole.step_s < 0.75


def test_one_call_prices_many_plans_as_many_calls_do():
    plans = [
        layout(tp=tp, pp=pp, dp=dp, zero=zero, shards=dp)
        for tp in (1, 8)
        for pp in (1, 4)
        for dp in (1, 8)
        for zero in (0, 1, 3)
    ]
    model = decoder_of(SHAPES["llama3-8b"], 2048)
    together = estimate(model, stack_fields(plans), RATES, STACK).step_s
    assert together == pytest.approx([float(estimate(model, plan, RATES, STACK).step_s) for plan in plans])


def test_every_constant_is_in_its_range_and_near_what_it_was_before():
    shares = ("products", "grouped", "exchange", "flash", "memory", "link", "network", "send", "hidden")
    for name, constant in CONSTANTS.items():
        assert abs(np.log(constant.value / constant.before)) <= 3 * constant.spread, name
        if name.startswith(shares):
            assert 0 < constant.value <= 1, name
        assert (constant.value == constant.before) or (constant.rows and constant.stacks and constant.error), name


def test_every_constant_bears_on_some_step():
    """One that does not is dead: a chip, a kernel and a software that need it are found by name."""
    eras = {era: vendor for vendor, _, era in reversed(GENERATIONS)}
    chips = {"volta": "V100", "ampere": "A100", "hopper": "H100", "blackwell": "B200", "blackwell-ultra": "B300",
             "tpu": "v5e", "cdna": "MI300X", "pascal": "P100", "other": "Gaudi3"}  # fmt: skip
    assert set(chips) == set(eras)
    wanted = {"products8": "fp8", "products4": "fp4"}
    for name in CONSTANTS:
        kind, *rest = name.split(".")
        era = rest[-1] if rest and rest[-1] in chips else "ampere"
        if name == "products4.other":
            continue  # No chip of another generation multiplies in 4 bits but AMD's.
        kernel = kind if kind.startswith("flash") else "flash-2"
        compute = wanted.get(kind, "bf16")
        kinds = [
            replace(
                Software(),
                attention=kernel,
                compute=compute,
                overlaps_data=data,
                overlaps_tensor=tensor,
                has_fused_norms=fused,
                has_fused_kernels=fused,
            )
            for data in (True, False)
            for tensor in (True, False)
            for fused in (True, False)
        ]
        kinds.append(Software(overlaps_experts=True))  # fmt: skip
        where = "A100-PCIe" if name == "power" else chips[era]
        assert any(_differs(where, software, name) for software in kinds), name


OF_EXPERTS = ("grouped", "exchange", "hidden.experts")


def _differs(name: str, software: Software, constant: str) -> bool:
    cluster = replace(usual_cluster(chip(name), 64), domain=8, topology="switched")
    changed = FITTED.with_changes({constant: FITTED[constant] * 0.9})
    model = decoder_of(SHAPES["qwen3-30b-a3b" if constant in OF_EXPERTS else "llama3-8b"], 2048)
    plan = layout(dp=64, tp=2, pp=2, ep=8, zero=3 if constant == "hidden.shards" else 1, shards=64, offload=1)
    first, second = (estimate(model, plan, *price_of(cluster, software, values)).step_s for values in (FITTED, changed))
    return bool(first != second)


def test_a_format_that_the_chip_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="A100-80GB-SXM does not multiply in fp8; it knows"):
        price_of(CLUSTER, replace(SUPERSTEP, compute="fp8"))


def test_latent_attention_has_the_parameters_of_deepseek_v3():
    # DeepSeek-V3 report, sec. 4.2: 671B parameters in all, multi-token prediction left out; norms are not counted.
    model = DecoderNumbers(
        **{field.name: array(0) for field in fields(DecoderNumbers)}
        | {
            "layers": array(61), "width": array(7168), "heads": array(128), "kv_heads": array(128),
            "head_dim": array(128), "ffn": array(18432), "vocab": array(129280), "gated": array(1),
            "experts": array(256), "experts_per_token": array(8), "shared_ffn": array(2048), "expert_ffn": array(2048),
            "dense_layers": array(3), "sequence_tokens": array(4096), "query_rank": array(1536), "key_rank": array(512),
        }
    )  # fmt: skip
    assert model.parameters == pytest.approx(671e9, rel=0.002)


def test_latent_attention_compares_wider_heads_than_it_sums():
    model = decoder_of(SHAPES["deepseek-v3"], 4096)
    plain = replace(model, query_rank=array(0), key_rank=array(0))

    def core(of: DecoderNumbers) -> tuple[float, float]:
        """Seconds of attention alone, forward and backward: what twice its rate saves, twice."""
        fast = replace(RATES, attention_backward=2 * RATES.attention_backward)
        slow, quick = (block_seconds(of, layout(), each, STACK, is_mixture=True) for each in (RATES, fast))
        return float(slow.attention_s), 2 * float(slow.input_s - quick.input_s)

    # Scores of 192 numbers, sums of 128; backward three products of the first kind and two of the second.
    for latent, other, wider in zip(core(model), core(plain), (320 / 256, 832 / 640), strict=True):
        assert latent == pytest.approx(wider * other, rel=1e-6)
    keys = [float(dense_layer(each, layout(tp=2), STACK, megatron()).whole) for each in (model, plain)]
    # 64 more of each query and key, and what both came from, as it is and normed: 2 bytes each, one sequence.
    assert keys[0] - keys[1] == 4096 * 2 * (64 * 2 * 128 / 2 + 2 * (1536 + 512))


def test_a_chip_with_less_power_for_its_peak_multiplies_more_slowly():
    cool, warm = (price_of(usual_cluster(chip(name), 8), Software())[0] for name in ("A100-PCIe", "A100"))
    # Best products of the catalogue: 252.9 against 271.2 TFLOP/s.
    assert float(cool.product_flops_per_s / warm.product_flops_per_s) == pytest.approx(252.9 / 271.2, abs=0.04)
    usual, unlike = (price_of(usual_cluster(chip(name), 8), Software())[0] for name in ("H100", "H200"))
    assert usual.product_flops_per_s == unlike.product_flops_per_s


def test_learned_positions_turn_no_queries_and_the_first_flash_kernel_is_as_fast_at_heads_of_64():
    model = decoder_of(SHAPES["llama3-8b"], 2048)
    eager = price_of(CLUSTER, replace(Software(), has_fused_kernels=False))
    turned, learned = (estimate(replace(model, rotates=array(value)), layout(), *eager).compute_s for value in (1, 0))
    # 13 passes over 5/4 of the width, forward and twice backward, at 2 bytes: 32 layers, 2,048 tokens, 16 microbatches.
    moved = 2 * 13 * FITTED["eager"] * 2048 * 40 * 128 * 3 * 32 * 16
    assert turned - learned == pytest.approx(moved / float(eager[0].memory_bytes_per_s), rel=1e-6)
    for kernel, ratio in (("flash-1", 1.0), ("flash-2", 2**0.35)):
        rates, stack = price_of(CLUSTER, replace(Software(), attention=kernel))
        wide = sum(attention_s(array(16), array(2048), array(2048), array(128), rates, stack))
        narrow = sum(attention_s(array(32), array(2048), array(2048), array(64), rates, stack))
        assert narrow / wide == pytest.approx(ratio), kernel


def test_each_microbatch_but_the_first_adds_its_gradients_to_those_before():
    model = decoder_of(SHAPES["llama3-8b"], 2048)
    once, often = (estimate(model, layout(microbatches=m), RATES, STACK).compute_s / m for m in (1, 16))
    moved = 15 / 16 * (2 + 2 * float(STACK.kept_gradient_bytes)) * 32 * float(model.dense_parameters)
    assert often - once == pytest.approx(moved / float(RATES.memory_bytes_per_s), rel=1e-6)


def test_the_sum_of_the_embedding_has_no_compute_left_to_hide_behind():
    hidden = replace(STACK, overlap_data=array(1))
    found = step(dp=8, microbatches=64, stack=hidden)
    size = array(float(STACK.gradient_bytes) * 128256 * 4096)
    assert found.data_s == pytest.approx(all_reduce_s(size, RankGroup(array(8), array(1)), RATES.links), rel=0.15)


def test_tokens_that_crowd_to_one_rank_slow_the_experts():
    model = decoder_of(SHAPES["qwen3-30b-a3b"], 2048)
    even, crowded = (
        estimate(replace(model, imbalance=array(value)), layout(dp=8, ep=8), RATES, STACK) for value in (1.0, 2.0)
    )
    # All but the latency.
    assert 1.8 * even.experts_s < crowded.experts_s < 2 * even.experts_s
    assert even.compute_s < crowded.compute_s < 2 * even.compute_s


def test_a_window_leaves_its_part_of_the_causal_pairs():
    # Of 2,048 tokens each sees 512: 512 · 2048 - 512² / 2 pairs of 2048² / 2.
    whole, slides = (
        estimate(replace(decoder_of(SHAPES["llama3-8b"], 2048), window=array(512), windowed_layers=array(share)),
                 layout(), RATES, STACK).compute_s
        for share in (0, 1)
    )  # fmt: skip
    seen = (512 * 2048 - 512**2 / 2) / (2048**2 / 2)
    scores = 16 * 32 * sum(attention_s(array(32), array(2048), array(2048), array(128), RATES, STACK))
    assert whole - slides == pytest.approx((1 - seen) * scores)
    assert float(decoder_of(SHAPES["mistral-7b"], 8192).window) == 4096
    longer = estimate(decoder_of(SHAPES["mistral-7b"], 32768), layout(), RATES, STACK)
    free = replace(decoder_of(SHAPES["mistral-7b"], 32768), windowed_layers=array(0))
    assert longer.compute_s < estimate(free, layout(), RATES, STACK).compute_s


def test_heads_that_tensor_cores_cannot_load_cost_what_published_steps_say():
    model = replace(decoder_of(SHAPES["gpt3-175b"], 2048), layers=array(32), width=array(2560), heads=array(32),
                    kv_heads=array(32), ffn=array(10240), gated=array(0))  # fmt: skip
    kept = price_of(CLUSTER, replace(Software(), attention="fused-softmax"))
    even, odd = (
        estimate(replace(model, head_dim=array(n)), layout(microbatch=4, microbatches=1), *kept).compute_s
        for n in (80, 76)
    )
    assert 0.62 <= even / odd <= 0.75
    fused = [sum(attention_s(array(32), array(2048), array(2048), array(n), RATES, STACK)) for n in (76, 80)]
    # Filled up to 80, but for the width on which the kernel was built.
    assert fused[0] == pytest.approx(fused[1] * (80 / 76) ** 0.35)


def test_neighbouring_tokens_on_a_rank_make_causal_attention_uneven():
    even, uneven = (price_of(CLUSTER, Software(balances_context=balanced)) for balanced in (True, False))
    model = decoder_of(SHAPES["llama3-8b"], 65536)
    first, second = (estimate(model, layout(cp=8), *each).compute_s for each in (even, uneven))
    scores = 16 * 32 * sum(attention_s(array(32), array(8192), array(65536), array(128), *even))
    assert second - first == pytest.approx((1 - 1 / 8) * scores)
    whole = layout(cp=8, is_ulysses=1)
    assert estimate(model, whole, *uneven).compute_s == estimate(model, whole, *even).compute_s


def test_an_exchange_of_experts_beside_compute_is_hidden_as_far_as_the_constant_says():
    model = decoder_of(SHAPES["qwen3-30b-a3b"], 2048)
    shown, hidden = (
        estimate(model, layout(dp=8, ep=8), *price_of(CLUSTER, Software(overlaps_experts=hides))).experts_s
        for hides in (False, True)
    )
    assert hidden / shown == pytest.approx(1 - FITTED["hidden.experts"])


def test_stages_that_do_not_divide_the_layers_fill_at_the_pace_of_the_largest():
    # 32 layers over 4 ranks: 8 stages of 4, or 12 of 2 and 3.
    even, uneven = (step(pp=4, chunks=v, schedule=2, microbatches=32).bubble_s for v in (2, 3))
    assert uneven / even == pytest.approx(2 / 3 * 3 / (32 / 12))
