"""Programs in which every pipeline rank holds an encoder: who encodes what, and what check says of a fault in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import compile_and_check, examples, plan_of
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.plan.sharding.stages import even_split
from superstep.program import instructions as ins
from superstep.program.check import InvalidProgram, check
from superstep.program.compile import compile_step
from superstep.program.peak_memory import UnitBytes, high_water, list_held_bytes
from superstep.program.text import describe, write_program

UNIT = UnitBytes(
    params=1000, gradient=4000, kept_all=80, kept_selective=50, kept_input=10, boundary=10,
    product_inputs=30, product_gradients=40,
)  # fmt: skip


def plan_with_encoder(pp=2, *, encoder="spread", in_front=2, **layout):
    """The first ``in_front`` units are an encoder that every pipeline rank holds."""
    plan = plan_of(layers=2 * pp + in_front, pp=pp, **layout)
    counts = even_split([1] * (len(plan.units) - in_front), pp)
    ends = [in_front + sum(counts[: n + 1]) for n in range(pp)]
    stages = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))
    return replace(plan, stages=(tuple(range(in_front)), *stages), placement=(0, *range(pp)), encoder=encoder)


@st.composite
def plans_with_encoder(draw: st.DrawFn):
    pp = draw(st.integers(2, 4))
    plan = plan_with_encoder(
        pp,
        encoder=draw(st.sampled_from(["spread", "bubbles"])),
        in_front=draw(st.integers(1, 3)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        microbatches=draw(st.integers(pp, 3 * pp)),
        dp=draw(st.integers(1, 2)),
        zero=draw(st.integers(0, 3)),
        recompute=draw(st.sampled_from(["none", "full"])),
        snapshot_every=draw(st.sampled_from([None, 2])),
    )
    return replace(plan, frozen=plan.stages[0] if draw(st.booleans()) else ())


@examples(40)
@given(plans_with_encoder())
def test_every_plan_compiles_and_keeps_the_rules(plan):
    program = compile_and_check(plan)
    peaks = high_water(program, [UNIT] * len(plan.units))
    for rank, peak in enumerate(peaks):
        assert peak.bytes > 0
        assert list_held_bytes(program, rank, [UNIT] * len(plan.units))[-1]["kept"] == 0


@examples(20)
@given(plans_with_encoder())
def test_every_rank_holds_the_encoder_encodes_its_share_and_sums_its_gradient(plan):
    program, pp = compile_step(plan), plan.mesh.pp
    for rank, instructions in enumerate(program.ranks):
        encoded = [i.microbatch for i in instructions if isinstance(i, ins.Forward) and i.unit == 0]
        assert encoded
        assert encoded == [m for m, place in enumerate(program.encoding) if place == rank]
        assert plan.encoder == "bubbles" or encoded == list(range(rank, plan.microbatches, pp))
        assert {i.unit for i in instructions if isinstance(i, ins.Tie)} == set(program.stages[0]) - set(plan.frozen)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("encode", [5, 10, 20])
def test_gaps_are_filled(schedule, encode):
    """The simulator's step is shorter than where pictures are spread, and no rank has much more to do than another."""
    plan = plan_with_encoder(2, schedule=schedule, microbatches=12)
    work = (*(encode for _ in plan.stages[0]), *(10 for units in plan.stages[1:] for _ in units))
    seconds = PerUnit(units=tuple(UnitSeconds(forward_s=n, backward_s=2 * n, weight_s=n) for n in work))
    spread, filled = (
        simulate(compile_step(replace(plan, encoder=encoder, work=work)), seconds) for encoder in ("spread", "bubbles")
    )
    assert filled.step_s < spread.step_s
    busy = [sum(e.end_s - e.start_s for e in filled.events if e.rank == rank) for rank in range(2)]
    assert max(busy) <= 1.1 * sum(busy) / 2


def test_a_pass_that_is_longer_than_a_gap_fills_it_too():
    """Its backward pass takes more than a rank waits at a time."""
    plan = plan_with_encoder(2, encoder="bubbles", microbatches=8)
    work = (20, 20, *(10 for units in plan.stages[1:] for _ in units))
    seconds = PerUnit(units=tuple(UnitSeconds(forward_s=n, backward_s=2 * n) for n in work))
    assert simulate(compile_step(replace(plan, work=work)), seconds).step_s <= 1.02 * 3 * 8 * sum(work) / 2


def test_who_has_less_to_do_encodes_more():
    plan = plan_with_encoder(2, encoder="bubbles", microbatches=8)
    work = tuple(10 if unit in plan.stages[0] else 12 if unit in plan.stages[1] else 6 for unit in range(8))
    encoding = compile_step(replace(plan, work=work)).encoding
    assert encoding.count(0) < encoding.count(1)


def test_a_program_with_an_encoder_in_front_has_no_word_of_it():
    assert "encoding" not in write_program(compile_step(plan_of(pp=2)))
    assert "encoding=0,1,0,1" in write_program(compile_step(plan_with_encoder())).splitlines()[0]


def without(program, rank, is_left_out):
    ranks = [list(instructions) for instructions in program.ranks]
    ranks[rank] = [i for i in ranks[rank] if not is_left_out(i)]
    return replace(program, ranks=tuple(map(tuple, ranks)))


def changed(program, rank, text, other):
    ranks = [list(instructions) for instructions in program.ranks]
    at = next(n for n, i in enumerate(ranks[rank]) if describe(i) == text)
    ranks[rank][at] = replace(ranks[rank][at], **other)
    return replace(program, ranks=tuple(map(tuple, ranks)))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            lambda p: without(p, 1, lambda i: isinstance(i, ins.Forward) and i.unit < 2 and i.microbatch == 1),
            "rank 1, instruction 1 .send act u2 m1 to 0.: what is sent must have been computed",
        ),
        (
            lambda p: without(p, 1, lambda i: getattr(i, "unit", 9) <= 2 and getattr(i, "microbatch", 0) == 1),
            "rank 1, at the end: u0 has no forward for m1",
        ),
        (lambda p: changed(p, 1, "forward u0 m1 keep=all", {"microbatch": 2}), "u0 m2 keep=all.: rank 0 encodes m2"),
        (lambda p: changed(p, 1, "send act u2 m1 to 0", {"microbatch": 3}), "what is sent must have been computed"),
        (
            lambda p: changed(p, 0, "recv act u2 m1 from 1", {"microbatch": 3}),
            "rank 0, instruction .*forward u2 m1 keep=all.: the unit's input is not there",
        ),
        (lambda p: changed(p, 0, "send grad u2 m1 to 1", {"microbatch": 0}), "what is sent must have been computed"),
        (lambda p: without(p, 1, lambda i: i == ins.Tie(1)), "the gradient of u1 is never tied"),
    ],
    ids=["skipped", "skipped whole", "not its share", "sent wrong", "placed wrong", "gradient wrong", "not summed"],
)  # fmt: skip
def test_check_names_a_fault(fault, says):
    with pytest.raises(InvalidProgram, match=says):
        check(fault(compile_step(plan_with_encoder())))
