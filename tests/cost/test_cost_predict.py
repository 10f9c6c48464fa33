"""Predictions: the closed forms they must meet, and what holds of every plan and machine."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.comm.device import Device
from superstep.cost.program.flops import model_flops_per_token, unit_parameters, unit_work
from superstep.cost.program.time.predict import MachineRates, durations, predict
from superstep.engine.flat.layout import lay_out
from superstep.engine.measure.probe_machine import measure
from superstep.engine.tracing.trace_units import operations_of
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.instructions import Backward, BackwardInput, BackwardWeight, Fetch, Reduce, Send

EVER = float("inf")
LAPTOP = MachineRates(gemm_flops_per_s=1e11, memory_bytes_per_s=2e10, link_bytes_per_s=1e9, link_latency_s=1e-4)
ONLY_PRODUCTS = MachineRates(gemm_flops_per_s=1e11, memory_bytes_per_s=EVER, link_bytes_per_s=EVER, link_latency_s=0.0)
ONLY_LINK = MachineRates(gemm_flops_per_s=EVER, memory_bytes_per_s=EVER, link_bytes_per_s=1e9, link_latency_s=0.0)


def run_of(*, layers=4, sequences=16, compute="fp32", qk_norm=False, **layout):
    return resolve(
        RunConfig(
            model=ModelConfig(name="tiny", layers=layers, qk_norm=qk_norm),
            data=DataConfig(sequence_tokens=64),
            train=TrainConfig(batch_sequences=sequences),
            plan=PlanConfig(**({"microbatch": 1} | layout)),
            numerics=NumericsConfig(compute=compute),
        )
    )


@st.composite
def runs(draw):
    return run_of(
        compute=draw(st.sampled_from(["fp32", "bf16"])),
        pp=draw(st.sampled_from([1, 2, 4])),
        dp=draw(st.sampled_from([1, 2, 4])),
        tp=draw(st.sampled_from([1, 2])),
        zero=draw(st.integers(0, 3)),
        microbatch=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        sequence_parallel=draw(st.booleans()),
    )


def ideal_s(run, machine):
    """All model operations, evenly on all ranks."""
    tokens = run.config.train.batch_sequences * run.config.data.sequence_tokens
    per_token = model_flops_per_token(run.shape, run.config.data.sequence_tokens)
    return tokens * per_token / run.plan.mesh.world / machine.gemm_flops_per_s


@pytest.mark.parametrize("layout", [{}, {"microbatch": 4}, {"dp": 4}, {"dp": 2, "zero": 2}, {"tp": 2}], ids=str)
def test_where_only_products_take_time_a_step_takes_its_model_flops(layout):
    run = run_of(**layout)
    assert predict(run, ONLY_PRODUCTS).step_s == pytest.approx(ideal_s(run, ONLY_PRODUCTS))


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 2}, {"tp": 2}], ids=str)
def test_a_loss_of_whole_answers_takes_a_forward_pass_more(layout):
    run = run_of(**layout)
    weighed = predict(run, ONLY_PRODUCTS, is_weighed=True)
    assert weighed.step_s == pytest.approx(ideal_s(run, ONLY_PRODUCTS) * 4 / 3)
    assert weighed.timeline == predict(run, ONLY_PRODUCTS).timeline


def test_full_recomputation_adds_the_blocks_forward():
    run = run_of(recompute="full")
    blocks = unit_work(run.shape, tokens=64, sequence_tokens=64)[1:-1]
    again_s = 16 * sum(block.forward_flops for block in blocks) / ONLY_PRODUCTS.gemm_flops_per_s
    assert predict(run, ONLY_PRODUCTS).step_s == pytest.approx(ideal_s(run, ONLY_PRODUCTS) + again_s)


def test_selective_recomputation_adds_no_product():
    plain, selective = (predict(run_of(recompute=r), ONLY_PRODUCTS).step_s for r in ("none", "selective"))
    assert selective == plain
    assert predict(run_of(recompute="selective"), LAPTOP).step_s > predict(run_of(), LAPTOP).step_s


@pytest.mark.parametrize("pp", [2, 4])
def test_zero_bubble_schedules_shorten_the_step(pp):
    """Stages even in blocks: what differs is the bubble alone."""
    ends = {1: 8 // pp + 1, 2: 8 // pp // 2 + 1}

    def step_s(schedule, chunks):
        inner = [8 // pp // chunks] * (pp * chunks - 2)
        stages = (ends[chunks], *inner, ends[chunks])
        run = run_of(layers=8, pp=pp, schedule=schedule, chunks=chunks, stages=stages)
        return predict(run, ONLY_PRODUCTS).step_s

    assert step_s("zb-v", 2) < step_s("zb-h1", 1) < step_s("1f1b", 1)


def test_stages_by_cost_have_a_smaller_bubble_where_the_head_is_large():
    """The demo's head has the work of a block, so the stages of three units each are uneven."""
    layout = {"model": ModelConfig(name="demo"), "plan": PlanConfig(pp=2, dp=1, microbatch=2)}
    by_cost = resolve(RunConfig(**layout))
    even = resolve(RunConfig(**layout | {"plan": replace(layout["plan"], stages=(3, 3))}))
    assert predict(by_cost, LAPTOP).bubble < predict(even, LAPTOP).bubble - 0.04
    assert predict(by_cost, LAPTOP).step_s < predict(even, LAPTOP).step_s


@settings(max_examples=40)
@given(runs())
def test_a_backward_is_its_two_halves_and_the_weights_half_has_no_products_of_attention(run):
    program = compile_step(run.plan)
    work = unit_work(run.shape, tokens=run.plan.microbatch * 64, sequence_tokens=64, tp=run.plan.mesh.tp)
    for machine in (LAPTOP, ONLY_PRODUCTS):
        seconds = durations(run, program, machine)
        for unit in range(len(run.plan.units)):
            halves = [seconds(kind(unit, 0), 0) for kind in (BackwardInput, BackwardWeight)]
            assert min(halves) >= 0
            assert sum(halves) == pytest.approx(seconds(Backward(unit, 0), 0))
    weight_s = durations(run, program, ONLY_PRODUCTS)(BackwardWeight(1, 0), 0)
    matrices = unit_parameters(run.shape)[1].matrices // run.plan.mesh.tp
    assert weight_s * ONLY_PRODUCTS.gemm_flops_per_s == pytest.approx(2 * run.plan.microbatch * 64 * matrices)
    assert weight_s < work[1].forward_flops / ONLY_PRODUCTS.gemm_flops_per_s


@settings(max_examples=40)
@given(runs())
def test_no_plan_beats_the_rate_of_the_machine(run):
    prediction = predict(run, LAPTOP)
    assert prediction.step_s > ideal_s(run, LAPTOP)
    assert prediction.bubble >= 0
    assert 0 <= prediction.exposed_s < prediction.step_s
    assert prediction.memory_bytes == max(rank.bytes for rank in prediction.memory)
    assert len(prediction.memory) == run.plan.mesh.pp


@settings(max_examples=20)
@given(runs(), st.sampled_from([f.name for f in fields(MachineRates)]))
def test_a_better_machine_is_no_slower_anywhere(run, field):
    better = replace(LAPTOP, **{field: getattr(LAPTOP, field) * (0.5 if field == "link_latency_s" else 2)})
    program = compile_step(run.plan)
    before, after = durations(run, program, LAPTOP), durations(run, program, better)
    for number, rank in enumerate(program.ranks):
        assert all(after(i, number) <= before(i, number) for i in set(rank))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_data_parallel_lanes_move_the_bytes_of_zero(zero, compute):
    """Of n ranks each moves (n - 1) / n of a buffer for a gather or a reduce-scatter, twice that for an all-reduce."""
    run = run_of(dp=4, zero=zero, sequences=8, compute=compute)
    layouts = lay_out(units(run.shape), run.plan.mesh, run.plan.mesh.at(0), run.plan.rules, sequence_parallel=False)
    moved = {Fetch: 0.0, Reduce: 0.0}
    for e in predict(run, ONLY_LINK).timeline.events:
        if type(e.instruction) in moved:
            expected = layouts[e.instruction.unit][0].padded * 3 / 4 / 1e9
            expected *= {"fp32": 4, "bf16": 2}[compute] if isinstance(e.instruction, Fetch) else 4
            expected *= 2 if zero == 0 else 1
            assert e.end_s - e.start_s == pytest.approx(expected)
            moved[type(e.instruction)] += 1
    assert moved[Reduce] >= 6
    assert bool(moved[Fetch]) == (zero > 0)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_tensor_parallel_sum_moves_the_partial_gradients(qk_norm, sequence_parallel):
    run = run_of(tp=2, sequence_parallel=sequence_parallel, qk_norm=qk_norm)
    layouts = lay_out(
        units(run.shape), run.plan.mesh, run.plan.mesh.at(0), run.plan.rules, sequence_parallel=sequence_parallel
    )
    partial = sum(high - low for (layout,) in layouts for low, high in layout.partial)
    seconds = durations(run, compile_step(run.plan), ONLY_LINK).reduce_partial_s
    assert seconds == pytest.approx(4 * partial / 1e9)


def test_a_transfer_moves_the_residual_stream_once():
    for layout, part in (({}, 1), ({"tp": 2}, 2), ({"tp": 2, "sequence_parallel": False}, 1)):
        run = run_of(pp=2, microbatch=2, **layout)
        sends = [e for e in predict(run, ONLY_LINK).timeline.events if isinstance(e.instruction, Send)]
        assert len(sends) == 16
        for e in sends:
            assert e.end_s - e.start_s == pytest.approx(2 * 64 * run.shape.width * 4 / part / 1e9)


def test_a_fused_head_computes_its_gradient_in_the_forward():
    for run in (run_of(), run_of(tp=2)):
        seconds = durations(run, compile_step(run.plan), ONLY_PRODUCTS).units[-1]
        assert (seconds.forward_s > 0, seconds.backward_s) == (True, 0.0)


def test_a_machine_is_measured_and_the_threads_are_left_as_they_were():
    threads = torch.get_num_threads()
    run = run_of(dp=2)
    machine = measure(run, Device("cpu"), operations_of(run, units(run.shape)))
    assert torch.get_num_threads() == threads
    assert machine.gemm_flops_per_s > 1e8
    assert machine.memory_bytes_per_s > 1e8
