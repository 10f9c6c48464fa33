"""Transient bytes: the closed forms of schedules, ZeRO and recompute, and what holds of every plan."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given

from plans import examples, plan_of, plans
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Backward, Forward, Recv, Send
from superstep.program.peak_memory import Peak, UnitBytes, course, forwards_in_flight, high_water, list_held_bytes

PARAMS, GRADIENT, ALL, SELECTIVE, INPUT, BOUNDARY = 1000, 4000, 80, 50, 10, 10
PRODUCTS = {"product_inputs": 30, "product_gradients": 40}
UNIT = UnitBytes(
    params=PARAMS,
    gradient=GRADIENT,
    kept_all=ALL,
    kept_selective=SELECTIVE,
    kept_input=INPUT,
    boundary=BOUNDARY,
    **PRODUCTS,
)


def peaks(plan, **only):
    """Each rank's peak; ``only`` keeps the named sizes and makes the others nothing."""
    program = compile_step(plan)
    return high_water(program, sizes_of(program, **only) if only else [UNIT] * len(plan.units))


def sizes_of(program, **only):
    sizes = dict.fromkeys((field.name for field in fields(UnitBytes)), 0)
    return [UnitBytes(**(sizes | only))] * len(program.units)


any_plan = examples(25)


@any_plan
@given(plans())
def test_a_peak_is_the_sum_of_its_parts_somewhere_in_the_rank(plan):
    program = compile_step(plan)
    for rank, peak in enumerate(high_water(program, [UNIT] * len(plan.units))):
        held = peak.params_bytes + peak.gradient_bytes + peak.kept_bytes + peak.boundary_bytes
        assert peak.bytes == held + peak.workspace_bytes
        assert 0 <= peak.index < len(program.ranks[rank])


@any_plan
@given(plans(recompute="none"))
def test_kept_activations_are_those_of_the_forwards_in_flight(plan):
    """The units of a rank's smallest and largest stage bound the bytes on both sides."""
    program = compile_step(plan)
    # A microbatch whose backward has come only half keeps as much here, so that both count alike.
    found = peaks(plan, kept_all=ALL, product_inputs=ALL)
    for rank, (peak, count) in enumerate(zip(found, forwards_in_flight(program), strict=True)):
        units = [sum(program.has_backward[u] for u in plan.stages[s]) for s in program.stages_of(rank)]
        assert count * min(units) * ALL <= peak.kept_bytes <= count * max(units) * ALL


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 2)])
def test_1f1b_keeps_fewer_the_later_the_stage_and_gpipe_keeps_all(pp, m):
    plan = {"pp": pp, "layers": 3 * pp, "microbatches": m}
    for rank, peak in enumerate(peaks(plan_of(**plan), kept_all=ALL)):
        units = 3 + (rank in (0, pp - 1))
        assert peak.kept_bytes == min(pp - rank, m) * units * ALL
    for rank, peak in enumerate(peaks(plan_of(**plan, schedule="gpipe"), kept_all=ALL)):
        assert peak.kept_bytes == m * (3 + (rank in (0, pp - 1))) * ALL


def test_recompute_keeps_inputs_and_one_block_whole():
    """Blocks keep their input, the embedding and the head everything; one block is computed again at a time."""
    layers = 6
    kept = {
        r: peaks(plan_of(layers=layers, recompute=r), kept_all=ALL, kept_selective=SELECTIVE, kept_input=INPUT)[0]
        for r in ("none", "selective", "full")
    }
    assert kept["none"].kept_bytes == (layers + 2) * ALL
    assert kept["selective"].kept_bytes == 2 * ALL + layers * SELECTIVE
    # The head is taken back before the first block is computed again, so they are never whole together.
    assert kept["full"].kept_bytes == 2 * ALL + layers * INPUT


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_zero_3_holds_the_unit_in_use_and_those_fetched_ahead(pp, prefetch):
    layout = {"pp": pp, "layers": 4 * pp, "dp": 2, "prefetch": prefetch}
    for peak in peaks(plan_of(**layout, zero=3), params=PARAMS):
        assert peak.params_bytes == (1 + prefetch) * PARAMS
    for zero in (0, 1, 2):
        assert all(peak.params_bytes == 0 for peak in peaks(plan_of(**layout, zero=zero), params=PARAMS))


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_2_holds_the_gradient_in_the_making_and_the_one_under_way(zero):
    for pp in (1, 2):
        plan = {"pp": pp, "layers": 4 * pp, "dp": 2}
        assert all(p.gradient_bytes == 2 * GRADIENT for p in peaks(plan_of(**plan, zero=zero), gradient=GRADIENT))
        assert all(p.gradient_bytes == 0 for p in peaks(plan_of(**plan, zero=1), gradient=GRADIENT))
    # Whole buffers stay from step to step where there is nobody to share them with.
    assert peaks(plan_of(layers=4, zero=zero), gradient=GRADIENT)[0].gradient_bytes == 0


def test_a_tied_head_holds_the_embedding_too():
    plan = {"layers": 4, "dp": 2, "zero": 3, "prefetch": 0}
    assert peaks(plan_of(**plan, tied=True), params=PARAMS)[0].params_bytes == 2 * PARAMS
    assert peaks(plan_of(**plan), params=PARAMS)[0].params_bytes == PARAMS


def test_between_units_there_is_one_input_or_two_gradients():
    assert peaks(plan_of(layers=3), boundary=BOUNDARY)[0].boundary_bytes == 2 * BOUNDARY
    program = compile_evaluation(plan_of(layers=3))
    # A forward pass that keeps nothing has its input and its output there.
    (peak,) = high_water(program, [UNIT] * len(program.units))
    assert (peak.boundary_bytes, peak.kept_bytes) == (2 * BOUNDARY, 0)


def test_a_receive_counts_from_where_it_is_posted_and_a_sent_value_until_the_peer_answers():
    """Rank 0 of a pipeline, whose sent values are answered by their gradients."""
    program = compile_step(plan_of(pp=2, layers=2, microbatches=4))
    levels = course(program, 0, sizes_of(program, boundary=BOUNDARY))
    held = {i: level.boundary_bytes for i, level in zip(program.ranks[0], levels, strict=True)}
    assert held[Recv("grad", 2, 0, 1)] == 2 * BOUNDARY  # of microbatch 0 what was sent and what is posted
    assert held[Send("act", 2, 1, 1)] == 3 * BOUNDARY
    assert held[Backward(1, 0)] == 3 * BOUNDARY  # a gradient comes and one goes; what was sent of microbatch 1
    assert max(held.values()) == held[Recv("grad", 2, 3, 1)] == 4 * BOUNDARY


def test_what_nobody_answers_is_held_until_the_step_ends():
    program = compile_step(plan_of(pp=2, layers=2, microbatches=4, schedule="gpipe"))
    *_, last = list_held_bytes(program, 1, sizes_of(program, boundary=BOUNDARY))
    assert last["boundary"] == 4 * BOUNDARY


def test_between_the_halves_of_a_backward_products_are_kept():
    """One rank, two blocks, one microbatch: the backward of the inputs all the way, then that of the weights."""
    plan = plan_of(layers=2, microbatches=1, schedule="zb-h1")
    (kept,) = peaks(plan, kept_all=ALL, **PRODUCTS)
    # At the first backward all four units are whole. It makes gradients as it drops what they need: its workspace.
    assert kept.kept_bytes == 4 * ALL
    (made,) = peaks(plan, kept_all=ALL, input_workspace=60, **PRODUCTS)
    assert made.bytes == 4 * ALL + 60
    (products,) = peaks(plan, **PRODUCTS)
    assert products.kept_bytes == 4 * sum(PRODUCTS.values())
    (one,) = peaks(plan_of(layers=2, microbatches=1), **PRODUCTS)
    assert one.kept_bytes == 0


@pytest.mark.parametrize("pp", [2, 4])
def test_zb_h1_peaks_at_what_1f1b_keeps_and_the_gradients_of_one_units_products(pp):
    """Where products keep as much between the halves as the unit did before."""
    layout = {"pp": pp, "layers": pp, "microbatches": 3 * pp, "stages": (2, *[1] * (pp - 2), 2)}
    first, *_ = peaks(plan_of(**layout), kept_all=ALL)
    for peak in peaks(plan_of(**layout, schedule="zb-h1"), kept_all=ALL, product_inputs=ALL - 40, product_gradients=40):
        assert peak.kept_bytes <= first.kept_bytes + 40


@pytest.mark.parametrize("zero", [2, 3])
def test_a_gradient_buffer_is_there_from_the_weights_on(zero):
    """Nothing is added to it while inputs have their turn, so no more is held than by an undivided backward."""
    layout = {"pp": 2, "layers": 8, "dp": 2, "zero": zero, "schedule": "zb-h1"}
    assert all(p.gradient_bytes == 2 * GRADIENT for p in peaks(plan_of(**layout), gradient=GRADIENT))


def test_a_kept_input_counts_once():
    program = compile_step(plan_of(layers=3, microbatches=1))
    forwards = tuple(i for i in program.ranks[0] if isinstance(i, Forward))
    size = UnitBytes(
        params=0,
        gradient=0,
        kept_all=10,
        kept_selective=0,
        kept_input=0,
        product_inputs=0,
        product_gradients=0,
        boundary=10,
    )
    (peak,) = high_water(replace(program, ranks=(forwards,)), [size] * 5)
    assert (peak.index, peak.kept_bytes, peak.boundary_bytes) == (3, 4 * 10, 10)


def test_an_empty_rank_has_no_peak():
    assert Peak().bytes == 0
