"""The program on a clock: the closed forms of the schedules, what overlaps, and where the seconds went."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import examples, plan_of, plans
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.observe.drawing.timeline import draw_text
from superstep.program.check import InvalidProgram, check
from superstep.program.compile import compile_step
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
    Send,
    Settle,
    Step,
    Tie,
)
from superstep.program.passes import add_recompute, add_step, add_transfers, lower
from superstep.program.peak_memory import forwards_in_flight
from superstep.program.schedule import order
from superstep.program.timeline import Timeline, brings, waits_for

FORWARD_S, BACKWARD_S = 1.0, 2.0


def per_stage(program, *, forward_s=FORWARD_S, backward_s=BACKWARD_S, weight_s=0.0):
    """Durations by which the stages of a rank together take these, however many units they have."""
    stages = [len(program.stages[program.stage_of(u)]) for u in range(len(program.units))]
    shares = [1 / units / program_chunks(program) for units in stages]
    return PerUnit(
        units=tuple(
            UnitSeconds(forward_s=forward_s * share, backward_s=backward_s * share, weight_s=weight_s * share)
            for share in shares
        )
    )


def program_chunks(program):
    return len(program.stages) // program.pp


def every_unit(program, **seconds):
    """Durations that are the same for every unit."""
    return PerUnit(units=(UnitSeconds(**{"forward_s": 1.0, "backward_s": 2.0} | seconds),) * len(program.units))


def run(plan):
    program = compile_step(plan)
    return simulate(program, per_stage(program))


small = st.integers(1, 6)


@examples(40)
@given(schedule=st.sampled_from(["gpipe", "1f1b"]), pp=small, m=st.integers(1, 12), over=st.integers(0, 3))
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_turns(schedule, pp, m, over):
    timeline = run(plan_of(pp=pp, schedule=schedule, layers=pp + over, microbatches=m))
    assert timeline.step_s == pytest.approx((m + pp - 1) * (FORWARD_S + BACKWARD_S))
    assert timeline.bubble() == pytest.approx((pp - 1) / m)


@examples(40)
@given(pp=st.integers(1, 5), chunks=st.integers(2, 4), rounds=st.integers(1, 3))
def test_interleaving_divides_the_bubble_by_the_chunks(pp, chunks, rounds):
    m = rounds * pp
    timeline = run(plan_of(pp=pp, chunks=chunks, schedule="interleaved", layers=pp * chunks, microbatches=m))
    assert timeline.bubble() == pytest.approx((pp - 1) / (chunks * m))


@examples(40)
@given(pp=st.integers(1, 4), chunks=st.integers(1, 4), more=st.integers(0, 3), groups=st.integers(1, 3))
def test_breadth_first_drains_the_pipeline_once_a_group(pp, chunks, more, groups):
    group = pp + more
    plan = plan_of(
        pp=pp,
        chunks=chunks,
        schedule="breadth-first",
        layers=pp * chunks,
        microbatches=group * groups,
        microbatch_group=group,
    )
    assert run(plan).bubble() == pytest.approx((pp - 1) / (chunks * group))


@examples(60)
@given(
    pp=st.integers(1, 8),
    more=st.integers(0, 6),
    weight_s=st.integers(1, 3),
    input_s=st.integers(0, 3),
    forward_s=st.integers(0, 3),
)
def test_zb_h1_shortens_the_bubble_by_two_weight_passes(pp, more, weight_s, input_s, forward_s):
    """(p - 1)(F + B - W), where 1F1B has (p - 1)(F + B + W), as long as W is the shortest of the three."""
    m = 2 * pp + more
    plan = plan_of(pp=pp, layers=pp, microbatches=m, schedule="zb-h1")
    f, b, w = forward_s + weight_s, input_s + weight_s, weight_s
    program = compile_step(plan)
    timeline = simulate(program, per_stage(program, forward_s=f, backward_s=b + w, weight_s=w))
    assert timeline.step_s == pytest.approx(m * (f + b + w) + (pp - 1) * (f + b - w))
    assert timeline.bubble() == pytest.approx((pp - 1) * (f + b - w) / (m * (f + b + w)))


@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_zb_v_waits_only_until_the_first_microbatch_comes(pp, more):
    """With F = B = W a rank of the V has no gap; the bubble is the way of one chunk's forward down to it and back."""
    m = 2 * pp - 1 + more
    program = compile_step(plan_of(pp=pp, chunks=2, layers=2 * pp, microbatches=m, schedule="zb-v"))
    timeline = simulate(program, per_stage(program, forward_s=2.0, backward_s=4.0, weight_s=2.0))
    assert timeline.step_s == pytest.approx(6 * m + pp - 1)
    assert timeline.bubble() == pytest.approx((pp - 1) / (6 * m))
    for rank in range(pp):
        first, last = timeline.of(rank)[0].start_s, max(e.end_s for e in timeline.of(rank)[:-1])
        gaps = [w for w in timeline.waits(rank) if first + rank < w.end_s - 1e-9 and w.start_s < last - 1e-9]
        assert sum(w.end_s - w.start_s for w in gaps) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 4)])
def test_too_long_a_warm_up_breaks_memory_and_leaves_the_time_right(pp, m):
    """The fault that a test of seconds alone would let through."""
    plan = plan_of(pp=pp, layers=pp, microbatches=m)
    tasks = list(order("1f1b", placement=range(pp), microbatches=m, group=m))
    for rank in range(pp - 1):
        forwards, backwards = ([t for t in tasks[rank] if t.kind == kind] for kind in ("forward", "backward"))
        warmup = min(pp - rank, m)
        steady = [t for pair in zip(forwards[warmup:], backwards, strict=False) for t in pair]
        tasks[rank] = (*forwards[:warmup], *steady, *backwards[m - warmup :])
    faulty = check(add_step(add_transfers(add_recompute(lower(plan, tuple(tasks), is_training=True)))))
    right = compile_step(plan)
    assert simulate(faulty, per_stage(faulty)).step_s == simulate(right, per_stage(right)).step_s
    assert forwards_in_flight(right) == tuple(min(pp - rank, m) for rank in range(pp))
    assert forwards_in_flight(faulty) == tuple(min(pp - rank + (rank < pp - 1), m) for rank in range(pp))


@st.composite
def timed(draw):
    """Any plan's program with any durations, in whole eighths so that sums are exact."""
    program = compile_step(draw(plans()))
    eighths = st.integers(0, 16).map(lambda n: n / 8)
    units = tuple(
        UnitSeconds(
            forward_s=draw(eighths) + 1,
            backward_s=draw(eighths) + 2,
            weight_s=draw(eighths) / 2,
            recompute_s=draw(eighths),
            fetch_s=draw(eighths),
            reduce_s=draw(eighths),
            settle_s=draw(eighths),
            tie_s=draw(eighths),
            transfer_s=draw(eighths),
        )
        for _ in program.units
    )
    return simulate(program, PerUnit(units=units, step_s=draw(eighths), reduce_partial_s=draw(eighths)))


@examples(25)
@given(timed())
def test_every_instruction_runs_once_and_each_lane_one_at_a_time(timeline):
    program = timeline.program
    places = sorted((e.rank, e.index) for e in timeline.events)
    assert places == [(rank, k) for rank, r in enumerate(program.ranks) for k in range(len(r))]
    lanes = {}
    for e in timeline.events:
        assert program.ranks[e.rank][e.index] == e.instruction
        peer = e.instruction.peer if isinstance(e.instruction, Send | Recv) else None
        kind = type(e.instruction).__name__ if peer is not None else ""
        lanes.setdefault((e.rank, e.lane, kind, peer), []).append(e)
    for events in lanes.values():
        assert all(a.end_s <= b.start_s for a, b in pairwise(sorted(events, key=lambda e: e.index)))


@examples(25)
@given(timed())
def test_compute_starts_when_what_it_needs_has_come_and_not_later(timeline):
    for rank in range(timeline.program.pp):
        came, clock_s = {}, 0.0
        for e in timeline.of(rank):
            if e.lane != "compute":
                assert e.start_s >= clock_s
                came[brings(e.instruction)] = e.end_s
            elif not isinstance(e.instruction, Step) and "Tie" not in type(e.instruction).__name__:
                needed = [came.get(a, 0.0) for a in waits_for(timeline.program, e.instruction)]
                assert e.start_s == max([clock_s, *needed])
            if e.lane == "compute":
                clock_s = e.end_s


@examples(25)
@given(timed())
def test_both_ends_of_a_transfer_have_the_same_seconds(timeline):
    sent, received = set(), set()
    for e in timeline.events:
        match e.instruction:
            case Send(wire, unit, m, peer):
                sent.add((e.rank, peer, wire, unit, m, e.start_s, e.end_s))
            case Recv(wire, unit, m, peer):
                received.add((peer, e.rank, wire, unit, m, e.start_s, e.end_s))
    assert sent == received


@examples(25)
@given(timed())
def test_the_parts_of_a_step_add_up(timeline):
    for spent in timeline.measure_uses():
        assert spent.busy_s + sum(spent.exposed_s.values()) + spent.bubble_s == pytest.approx(timeline.step_s)
        assert min(spent.busy_s, spent.bubble_s, *spent.exposed_s.values()) >= 0


@examples(30)
@given(
    layers=st.integers(1, 6),
    m=st.integers(1, 4),
    fetch_s=st.sampled_from([0.25, 0.5, 1.0]),
    recompute=st.sampled_from(["none", "full"]),
    prefetch=st.integers(1, 3),
)
def test_zero_3_hides_every_fetch_but_the_first(layers, m, fetch_s, recompute, prefetch):
    plan = plan_of(layers=layers, microbatches=m, dp=2, zero=3, schedule="1f1b", recompute=recompute, prefetch=prefetch)
    program = compile_step(plan)
    timeline = simulate(program, every_unit(program, fetch_s=fetch_s, recompute_s=1.0))
    (spent,) = timeline.measure_uses()
    # The first window is fetched in one go; only its first unit has nothing to hide behind.
    assert spent.exposed_s["fetch"] == fetch_s
    assert timeline.step_s == spent.busy_s + fetch_s


def test_without_prefetch_fetches_are_in_the_way():
    plan = plan_of(layers=4, dp=2, zero=3, prefetch=0)
    program = compile_step(plan)
    fetches = sum(isinstance(i, Fetch) for i in program.ranks[0])
    (spent,) = simulate(program, every_unit(program, fetch_s=0.5)).measure_uses()
    assert spent.exposed_s["fetch"] == 0.5 * fetches


@pytest.mark.parametrize("pp", [2, 4])
def test_zero_3_in_a_pipeline_exposes_at_most_the_first_fetch_of_each_rank(pp):
    program = compile_step(plan_of(pp=pp, dp=2, zero=3, layers=4 * pp, microbatches=2 * pp))
    spent = simulate(program, every_unit(program, fetch_s=0.5)).measure_uses()
    assert spent[0].exposed_s["fetch"] == 0.5
    assert all(s.exposed_s["fetch"] == 0 for s in spent[1:])


@pytest.mark.parametrize("zero", [0, 1])
def test_reductions_run_beside_the_backward_but_for_the_last(zero):
    program = compile_step(plan_of(layers=6, microbatches=2, dp=2, zero=zero))
    (spent,) = simulate(program, every_unit(program, reduce_s=2.0)).measure_uses()
    assert spent.exposed_s["reduce"] == 2.0


def test_a_slow_channel_shows_as_exposed_and_not_as_bubble():
    program = compile_step(plan_of(pp=2, layers=2, microbatches=4))
    fast, slow = (simulate(program, every_unit(program, transfer_s=t)).measure_uses() for t in (0.0, 1.0))
    assert not any(fast[rank].exposed_s[wire] for rank in (0, 1) for wire in ("act", "grad"))
    assert slow[1].exposed_s["act"] > 0
    assert slow[0].exposed_s["grad"] > 0


def test_a_channel_carries_one_transfer_at_a_time_and_each_direction_has_its_own():
    program = compile_step(plan_of(pp=2, layers=2, microbatches=2, schedule="gpipe"))
    timeline = simulate(program, every_unit(program, forward_s=1.0, backward_s=1.0, transfer_s=10.0))
    sends = [(e.lane, e.start_s, e.end_s) for e in timeline.events if isinstance(e.instruction, Send)]
    # Two units forward on each rank; the second activation is ready at 4 s and waits for the channel until 12 s.
    assert sends == [("act", 2, 12), ("act", 12, 22), ("grad", 26, 36), ("grad", 36, 46)]


def test_each_instruction_waits_for_its_inputs_its_parameters_or_its_reduction():
    program = compile_step(plan_of(layers=1, dp=2, zero=3, tied=True, recompute="full"))
    waits = {
        Forward(2, 5, "all"): [("act", 2, 5), ("fetch", 2, None), ("fetch", 0, None)],
        Recompute(1, 5): [("fetch", 1, None)],
        Backward(1, 5): [("grad", 2, 5), ("fetch", 1, None)],
        BackwardInput(1, 5): [("grad", 2, 5), ("fetch", 1, None)],
        BackwardWeight(1, 5): [],
        Settle(1): [("reduce", 1, None)],
        Fetch(1): [],
        Step(): [(lane, u, None) for lane in ("reduce", "snapshot") for u in range(3)],
        Tie(0): [("reduce", u, None) for u in range(3)],
    }
    for instruction, arrivals in waits.items():
        assert waits_for(program, instruction) == arrivals
    assert [brings(i) for i in (Fetch(1), Reduce(1), Recv("act", 1, 5, 0), Send("act", 1, 5, 0))] == [
        ("fetch", 1, None),
        ("reduce", 1, None),
        ("act", 1, 5),
        None,
    ]


@pytest.mark.parametrize("copy_s", [0.5, 5.0, 10.0])
def test_copies_are_hidden_until_they_are_longer_than_what_lies_before_the_update(copy_s):
    plan = plan_of(layers=2, microbatches=2, snapshot_every=1)
    program, plain = compile_step(plan), compile_step(replace(plan, snapshots=False))
    base = PerUnit(units=(UnitSeconds(forward_s=1, backward_s=2),) * len(program.units), step_s=1)
    step_s = simulate(plain, base).step_s
    found = simulate(program, replace(base, units=tuple(replace(unit, snapshot_s=copy_s) for unit in base.units)))
    longer_s = max(0.0, len(program.units) * copy_s + 1 - step_s)
    assert found.step_s == pytest.approx(step_s + longer_s)
    assert found.measure_uses()[0].exposed_s["snapshot"] == pytest.approx(longer_s)


def test_a_deadlock_says_who_waits_for_what():
    program = compile_step(plan_of(pp=2, layers=2, microbatches=2))
    first = program.ranks[0]
    starved = tuple(i for i in first if not (isinstance(i, Send) and i.microbatch == 1))
    with pytest.raises(InvalidProgram, match=r"deadlock: .*rank 1 waits for act u2 m1 at instruction \d+ \(forward u2"):
        simulate(replace(program, ranks=(starved, *program.ranks[1:])), every_unit(program))


def test_per_unit_has_seconds_for_every_instruction():
    durations = PerUnit(
        units=(UnitSeconds(forward_s=1, backward_s=9, weight_s=2, reduce_s=3, settle_s=4, transfer_s=5),), step_s=6
    )
    asked = [
        Forward(0, 0, "all"),
        Backward(0, 0),
        BackwardInput(0, 0),
        BackwardWeight(0, 0),
        Reduce(0),
        Settle(0),
        Send("act", 0, 0, 1),
        Recv("act", 0, 0, 1),
        Step(),
        Free(0),
    ]
    assert [durations(i, 0) for i in asked] == [1, 9, 7, 2, 3, 4, 5, 5, 6, 0]


DRAWN = (
    plan_of(pp=2),
    plan_of(pp=4, layers=6, microbatches=12, schedule="gpipe"),
    plan_of(pp=2, chunks=2, dp=2, zero=3, schedule="interleaved"),
    plan_of(pp=2, chunks=3, layers=6, dp=2, zero=1, schedule="breadth-first"),
    plan_of(layers=2, dp=2, zero=3, recompute="full", tied=True),
    plan_of(pp=2, layers=3, dp=2, zero=2, schedule="zb-h1"),
    plan_of(pp=3, chunks=2, layers=6, schedule="zb-v"),
)


def visible(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize("plan", DRAWN)
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [80, 133, 200])
def test_a_drawing_has_a_row_for_each_rank_and_keeps_to_its_width(plan, colour, width):
    program = compile_step(plan)
    timeline = simulate(program, every_unit(program, fetch_s=0.5, reduce_s=0.7, transfer_s=0.4, recompute_s=1.0))
    text = draw_text(timeline, width, colour)
    lines = visible(text).splitlines()
    assert max(map(len, lines)) <= width
    assert [line[:8].strip() for line in lines if line.startswith(" rank")] == [
        f"rank {r}" for r in range(plan.mesh.pp)
    ]
    assert ("\x1b" in text) == colour
    for lane, kind in (("fetch", Fetch), ("reduce", Reduce), ("send", Send)):
        has_lane = any(isinstance(i, kind) for r in program.ranks for i in r)
        assert any(line.startswith(f"{lane:>7}") for line in lines) == has_lane
    assert f"step {timeline.step_s * 1e3:.4g} ms" in visible(text)


def test_a_drawing_shows_the_schedule():
    program = compile_step(plan_of(pp=2, layers=2, microbatches=4, schedule="gpipe"))
    milliseconds = {"forward_s": 1.5e-3, "backward_s": 3e-3}
    timeline = simulate(program, every_unit(program, **milliseconds))
    assert draw_text(timeline, 45 + 9, colour=False).splitlines() == [
        " rank 0 │0░░1░░2░░3░░·········0▓▓▓▓▓1▓▓▓▓▓2▓▓▓▓▓3▓▓▓▓▓",
        " rank 1 │···0░░1░░2░░3░░0▓▓▓▓▓1▓▓▓▓▓2▓▓▓▓▓3▓▓▓▓▓······",
        "        └┬─────────┬─────────┬─────────┬─────────┬────",
        "         0         10        20        30        40 ms",
        "         ░░ forward   ▓▓ backward   ·· bubble",
        "         step 45 ms = compute 36",
        "         + bubble 9 (25.0% of compute)",
    ]


def test_a_recording_is_drawn_like_a_simulation():
    """A recorded clock starts anywhere, and the events may come in any order."""
    program = compile_step(plan_of(pp=2, dp=2, zero=3))
    timeline = simulate(program, every_unit(program, fetch_s=0.5))
    later = [replace(e, start_s=e.start_s + 1024.0, end_s=e.end_s + 1024.0) for e in timeline.events]
    recorded = Timeline(program, tuple(reversed(later)))
    assert draw_text(recorded, 120, colour=False) == draw_text(timeline, 120, colour=False)


def test_an_empty_timeline_is_drawn_empty():
    program = compile_step(plan_of(pp=2))
    assert "step 0 ms" in draw_text(Timeline(program, ()), 80, colour=True)
