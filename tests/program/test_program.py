"""Programs: what the passes promise of every plan, counted without ``check``; the text form; the goldens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden import FOLDER, GOLDEN
from plans import examples, plan_of, plans
from superstep.errors import UserError
from superstep.plan.config import LoraConfig
from superstep.program.check import check
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Fetch,
    Forward,
    Free,
    Recompute,
    Recv,
    Reduce,
    ReducePartial,
    ReduceReplicas,
    Send,
    Settle,
    Snapshot,
    Step,
    Tie,
    is_compute,
    lane,
)
from superstep.program.p2p_setup import routes
from superstep.program.text import describe, read_instruction, read_program, write_program

any_plan = examples(25)


def of(program, kind):
    """Every instruction of a kind, on all ranks."""
    return [i for instructions in program.ranks for i in instructions if isinstance(i, kind)]


def trained_by(program, rank):
    """The units that a rank holds and that have gradients."""
    return [unit for unit in program.list_held_units(rank) if unit not in program.frozen]


def first_trained(plan):
    """Of a chain: no unit before it has a backward pass."""
    return next(unit for unit, reads in enumerate(plan.params) if not set(reads) <= set(plan.frozen))


def is_shared(plan):
    """Whether ranks of a stage hold the same parameters, be it only the experts or only the others."""
    return any(len(group) > 1 for family in plan.families for group in plan.mesh.shard_groups(family))


@any_plan
@given(plans())
def test_every_plan_compiles_and_its_text_round_trips(plan):
    for program in (compile_step(plan), compile_evaluation(plan)):
        assert check(program) is program
        assert read_program(write_program(program)) == program


@any_plan
@given(plans())
def test_a_copy_of_each_trained_unit_is_started_before_it_is_first_used_and_nothing_else_changes(plan):
    plain, program = compile_step(plan), compile_step(replace(plan, snapshots=True))
    assert check(read_program(write_program(program))) == program
    for rank, instructions in enumerate(program.ranks):
        copied = [i.unit for i in instructions if isinstance(i, Snapshot)]
        assert sorted(copied) == trained_by(program, rank), "each once, also what several ranks hold"
        assert tuple(i for i in instructions if not isinstance(i, Snapshot)) == plain.ranks[rank]
        for unit in copied:
            uses = [k for k, i in enumerate(instructions) if is_compute(i) and unit in program.params[i.unit]]
            assert instructions.index(Snapshot(unit)) < min(uses), "the copy runs beside the compute"


@any_plan
@given(plans())
def test_each_unit_sees_each_microbatch_once_forward_then_backward(plan):
    program = compile_step(plan)
    everything = Counter((u, m) for u in range(len(plan.units)) for m in range(plan.microbatches))
    assert Counter((i.unit, i.microbatch) for i in of(program, Forward)) == everything
    back = Counter(each for each in everything if each[0] >= first_trained(plan))
    is_in_two = plan.schedule in ("zb-h1", "zb-v")
    first = BackwardInput if is_in_two else Backward
    assert Counter((i.unit, i.microbatch) for i in of(program, first)) == back
    assert Counter((i.unit, i.microbatch) for i in of(program, BackwardWeight)) == (back if is_in_two else {})
    assert not of(program, Backward if is_in_two else BackwardInput)
    for rank, instructions in enumerate(program.ranks):
        at = {i: k for k, i in enumerate(instructions) if is_compute(i) or isinstance(i, BackwardWeight)}
        for i, k in at.items():
            assert program.place(program.stage_of(i.unit), i.microbatch) == rank
            if isinstance(i, Forward) and i.unit < first_trained(plan):
                assert i.keep == "nothing"
            elif isinstance(i, Forward):
                assert k < at[first(i.unit, i.microbatch)]
            if isinstance(i, BackwardInput):
                assert k < at[BackwardWeight(i.unit, i.microbatch)]


@any_plan
@given(plans())
def test_sends_match_receives_and_are_as_many_as_the_boundaries(plan):
    program = compile_step(plan)
    sent, received = {}, {}
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if isinstance(i, Send):
                sent.setdefault((rank, i.peer, i.wire), []).append((i.unit, i.microbatch))
            elif isinstance(i, Recv):
                received.setdefault((i.peer, rank, i.wire), []).append((i.unit, i.microbatch))
    assert sent == received
    boundaries = [stage for stage, (a, b) in enumerate(pairwise(plan.placement)) if a != b]
    back = [stage for stage in boundaries if plan.stages[stage][-1] >= first_trained(plan)]
    assert len(of(program, Send)) == plan.microbatches * (len(boundaries) + len(back))
    assert len(of(compile_evaluation(plan), Send)) == plan.microbatches * len(boundaries)
    # NCCL has a group for each channel, made before the first step.
    assert set(sent) <= set(routes(plan.placement))
    assert back != boundaries or set(sent) == set(routes(plan.placement))


@any_plan
@given(plans())
def test_what_is_fetched_is_freed_and_what_is_reduced_is_settled(plan):
    program = compile_step(plan)
    for rank, instructions in enumerate(program.ranks):
        count = Counter((type(i), i.unit) for i in instructions if isinstance(i, Fetch | Free | Reduce | Settle))
        for unit in program.list_held_units(rank):
            assert count[Reduce, unit] == count[Settle, unit]
            assert count[Free, unit] == (count[Fetch, unit] if plan.zero == 3 else 0)
            is_trained = unit not in program.frozen
            assert bool(count[Reduce, unit]) == (is_shared(plan) and is_trained)
            assert bool(count[Fetch, unit]) == (is_shared(plan) and plan.zero > (0 if is_trained else 2))
        assert instructions[-1] == Step()
        assert instructions.count(ReducePartial()) == (plan.mesh.tp > 1)


@any_plan
@given(plans())
def test_recomputing_in_full_computes_every_block_twice(plan):
    program = compile_step(plan)
    blocks = sum(plan.recomputed) if plan.recompute == "full" else 0
    assert len(of(program, Recompute)) == blocks * plan.microbatches


@any_plan
@given(plans(zero=1) | plans(zero=0))
def test_zero_0_and_1_reduce_and_fetch_a_unit_once_a_step(plan):
    program = compile_step(plan)
    held = [(rank, unit) for rank in range(plan.mesh.pp) for unit in trained_by(program, rank)]
    assert len(of(program, Reduce)) == (len(held) if is_shared(plan) else 0)
    assert len(of(program, Fetch)) == (len(held) if is_shared(plan) and plan.zero else 0)


@any_plan
@given(plans() | plans(dp=4, zero=2, replicas=2, ep=1) | plans(dp=2, cp=2, zero=3, replicas=2, tied=True, ep=1))
def test_replicas_are_summed_once_a_step_of_what_is_settled_for_good(plan):
    """After the unit's last settling, and before its gradient is tied or the norm is taken."""
    program = compile_step(plan)
    for rank, instructions in enumerate(program.ranks):
        at = {i: k for k, i in enumerate(instructions)}  # a unit's last Settle and BackwardWeight
        assert Counter(i.unit for i in instructions if isinstance(i, ReduceReplicas)) == (
            dict.fromkeys(trained_by(program, rank), 1) if plan.mesh.replicas > 1 else {}
        )
        for i, k in at.items():
            if isinstance(i, ReduceReplicas):
                assert at[Settle(i.unit)] < k < at.get(Tie(i.unit), at[Step()])
                assert k < at.get(ReducePartial(), at[Step()])


@any_plan
@given(plans(zero=2, dp=2, chunks=1, schedule="1f1b") | plans(zero=3, dp=2, schedule="zb-h1"))
def test_zero_2_reduces_a_unit_after_every_microbatch(plan):
    program = compile_step(plan)
    for rank, instructions in enumerate(program.ranks):
        reduced = Counter(i.unit for i in instructions if isinstance(i, Reduce))
        assert reduced == dict.fromkeys(trained_by(program, rank), plan.microbatches)


@any_plan
@given(plans(zero=3, dp=2, schedule="breadth-first", chunks=2, tied=False))
def test_breadth_first_reduces_a_unit_once_a_group(plan):
    program = compile_step(plan)
    for rank, instructions in enumerate(program.ranks):
        reduced = Counter(i.unit for i in instructions if isinstance(i, Reduce))
        assert reduced == dict.fromkeys(trained_by(program, rank), plan.microbatches // plan.microbatch_group)


@any_plan
@given(plans(lora=LoraConfig(), experts=None, ep=1))
def test_what_has_no_adapter_is_frozen_and_nothing_of_it_is_summed(plan):
    program = compile_step(plan)
    assert program.frozen == (0, len(plan.units) - 1)
    assert not {i.unit for i in of(program, Reduce | Settle | ReduceReplicas | Tie)} & set(program.frozen)
    assert compile_evaluation(plan).frozen == program.frozen


@any_plan
@given(layers=st.integers(1, 8), m=st.integers(1, 5), prefetch=st.integers(0, 4))
def test_zero_3_fetches_twice_a_microbatch_but_at_the_turns(layers, m, prefetch):
    """Forward and backward use every unit; at each of the 2m - 1 turns, 1 + prefetch are still there."""
    program = compile_step(plan_of(layers=layers, microbatches=m, dp=2, zero=3, schedule="1f1b", prefetch=prefetch))
    units = layers + 2
    assert len(of(program, Fetch)) == 2 * m * units - (2 * m - 1) * min(1 + prefetch, units)


@any_plan
@given(plans(tied=True))
def test_a_tied_head_is_tied_where_its_parameters_live_on_two_ranks(plan):
    program = compile_step(plan)
    holders = {plan.placement[0], plan.placement[-1]}
    expected = holders if len(holders) > 1 and 0 not in program.frozen else set()
    assert {rank for rank, r in enumerate(program.ranks) if Tie(0) in r} == expected
    assert len(of(program, Tie)) == len(expected)


@any_plan
@given(plans())
def test_an_evaluation_keeps_and_changes_nothing(plan):
    program = compile_evaluation(plan)
    assert all(i.keep == "nothing" for i in of(program, Forward))
    assert not of(program, Backward | BackwardInput | BackwardWeight | Reduce | Tie | Step | Recompute)


@any_plan
@given(plans(schedule="zb-h1", zero=3, dp=2) | plans(schedule="zb-v", zero=3, dp=2))
def test_weights_gradients_need_no_parameters(plan):
    """ZeRO-3 frees a unit before its BackwardWeight where nothing else computes with it soon."""
    program = compile_step(plan)
    found = 0
    for instructions in program.ranks:
        resident = set()
        for i in instructions:
            if isinstance(i, Fetch | Free):
                resident ^= {i.unit}
            if isinstance(i, BackwardWeight):
                found += i.unit not in resident
    assert found or plan.prefetch


@any_plan
@given(plans(schedule="zb-v"))
def test_a_v_goes_down_the_ranks_and_up_again(plan):
    pp = plan.mesh.pp
    assert plan.placement == tuple(s if s < pp else 2 * pp - 1 - s for s in range(2 * pp))
    program = compile_step(plan)
    assert not of(program, Tie)
    between = [(n, i.peer) for n, r in enumerate(program.ranks) for i in r if isinstance(i, Send)]
    assert all(abs(a - b) == 1 for a, b in between)


def test_every_instruction_has_a_text_and_a_lane():
    lanes = {
        Forward(3, 5, "selective"): ("forward u3 m5 keep=selective", "compute"),
        Recompute(3, 5): ("recompute u3 m5", "compute"),
        Backward(3, 5): ("backward u3 m5", "compute"),
        BackwardInput(3, 5): ("backward-input u3 m5", "compute"),
        BackwardWeight(3, 5): ("backward-weight u3 m5", "compute"),
        Send("act", 3, 5, 1): ("send act u3 m5 to 1", "act"),
        Recv("grad", 3, 5, 1): ("recv grad u3 m5 from 1", "grad"),
        Fetch(3): ("fetch u3", "fetch"),
        Free(3): ("free u3", "compute"),
        Reduce(3): ("reduce u3", "reduce"),
        Settle(3): ("settle u3", "compute"),
        ReduceReplicas(3): ("reduce-replicas u3", "reduce"),
        Tie(3): ("tie u3", "compute"),
        ReducePartial(): ("reduce-partial", "compute"),
        Step(): ("step", "compute"),
    }
    for instruction, (text, its_lane) in lanes.items():
        assert describe(instruction) == text
        assert read_instruction(text) == instruction
        assert lane(instruction) == its_lane


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: a program starts with"),
        ("program zero=0 microbatches=1 placement=0 passes=\nrank 1\n", "line 2: 'rank 1' is neither"),
        (
            "program zero=0 microbatches=1 placement=0 passes=\nrank 0\n  fetch x0\n",
            "line 3: 'fetch x0' is no instruction",
        ),
    ],
)
def test_text_that_is_no_program_is_refused_with_its_line(text, words):
    with pytest.raises(UserError, match=words):
        read_program(text)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    """A change here is a change of what runs: ``python tests/support/golden.py --update`` and read the diff."""
    assert GOLDEN[name]() == (FOLDER / name).read_text(encoding="utf-8")


def test_no_golden_is_left_behind():
    kinds = ("program-*.txt", "timeline-*.txt")
    assert {path.name for kind in kinds for path in FOLDER.glob(kind)} == set(GOLDEN)
