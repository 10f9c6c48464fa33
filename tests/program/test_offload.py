"""Offloads in programs: what the pass promises of every plan, the rules of check, memory, and a step on a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import examples, plan_of, plans
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.errors import ConfigError
from superstep.observe.drawing.step_svg import draw_svg
from superstep.observe.drawing.timeline import draw_text
from superstep.program import instructions as ins
from superstep.program.check import InvalidProgram, check
from superstep.program.check_offload import check_copies
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.offload import find_ended_offloads
from superstep.program.peak_memory import UnitBytes, high_water
from superstep.program.text import read_program, write_program
from superstep.program.timeline import Timeline

MOVES = ins.Offload | ins.Reload


def offloading(plan, *, ahead=1, units=None):
    """The plan with the kept activations of some units, or of all, on the disk."""
    places = tuple("disk" if units is None or u in units else "device" for u in range(len(plan.units)))
    return replace(plan, activations=places, reload_ahead=ahead)


def list_present(program, rank):
    """The units and microbatches that a rank keeps in memory while each instruction runs."""
    ended, present, counts = find_ended_offloads(program, rank), set(), []
    for place, i in enumerate(program.ranks[rank]):
        present -= set(ended.get(place, ()))
        match i:
            case ins.Forward(unit, m, keep) if keep != "nothing":
                present.add((unit, m))
            case ins.Reload(unit, m):
                present.add((unit, m))
        counts.append(frozenset(present))
        if isinstance(i, ins.Backward | ins.BackwardInput):
            present.discard((i.unit, i.microbatch))
    return counts


def sizes_of(program, *, kept=100, boundary=10):
    """Each unit's bytes: alike, but the first takes a field of the batch and the last returns nothing."""
    block = UnitBytes(
        params=0,
        gradient=0,
        kept_all=kept,
        kept_selective=kept // 2,
        kept_input=boundary,
        product_inputs=0,
        product_gradients=0,
        boundary=boundary,
    )
    first = replace(block, kept_all=kept + 3, kept_selective=kept + 3, kept_input=3, boundary=0)
    return (first, *[block] * (len(program.units) - 1))


def seconds_of(program, *, copy_s=0.5):
    return PerUnit(
        units=(UnitSeconds(forward_s=1.0, backward_s=2.0, offload_s=copy_s, reload_s=copy_s),) * len(program.units)
    )


@examples(25)
@given(plan=plans(), ahead=st.integers(1, 3))
def test_a_program_with_offloads_is_the_same_program_beside_them(plan, ahead):
    plain, moved = compile_step(plan), compile_step(offloading(plan, ahead=ahead))
    assert compile_evaluation(offloading(plan)) == compile_evaluation(plan)
    for before, after in zip(plain.ranks, moved.ranks, strict=True):
        assert tuple(i for i in after if not isinstance(i, MOVES)) == before
    assert read_program(write_program(moved)) == moved


@examples(25)
@given(plan=plans(schedule="1f1b"))
def test_a_rank_keeps_three_units_in_memory_at_most(plan):
    program = compile_step(offloading(plan))
    for rank in range(program.pp):
        assert max(map(len, list_present(program, rank))) <= 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v"])
def test_every_schedule_keeps_three_units_in_memory_at_most(schedule):
    chunks = 2 if schedule in ("interleaved", "breadth-first", "zb-v") else 1
    program = compile_step(offloading(plan_of(layers=8, pp=2, chunks=chunks, schedule=schedule, microbatches=4)))
    assert any(isinstance(i, ins.Offload) for i in program.ranks[0])
    for rank in range(program.pp):
        assert max(map(len, list_present(program, rank))) <= 3


@examples(25)
@given(plan=plans(), ahead=st.integers(1, 3), copy_s=st.sampled_from([0.1, 1.0, 7.0]))
def test_on_a_clock_every_copy_is_where_it_may_be(plan, ahead, copy_s):
    program = compile_step(offloading(plan, ahead=ahead))
    timeline = simulate(program, seconds_of(program, copy_s=copy_s))
    check_copies(timeline)
    for spent in timeline.measure_uses():
        assert spent.busy_s + sum(spent.exposed_s.values()) + spent.bubble_s == pytest.approx(timeline.step_s)


def test_copies_shorter_than_the_passes_take_no_time_but_the_last():
    program = compile_step(offloading(plan_of(layers=8, microbatches=1)))
    plain = simulate(compile_step(plan_of(layers=8, microbatches=1)), seconds_of(program)).step_s
    assert simulate(program, seconds_of(program, copy_s=0.9)).step_s == pytest.approx(plain)
    slow = simulate(program, seconds_of(program, copy_s=3.0))
    assert slow.step_s > plain
    assert slow.measure_uses()[0].exposed_s["out"] > 0
    assert slow.measure_uses()[0].exposed_s["in"] > 0


def test_both_lanes_are_drawn():
    program = compile_step(offloading(plan_of(layers=8, microbatches=1)))
    timeline = simulate(program, seconds_of(program))
    text = draw_text(timeline, width=120, colour=False)
    assert any(line.strip().startswith("out") for line in text.splitlines())
    assert any(line.strip().startswith("in") for line in text.splitlines())
    svg = draw_svg([("offloaded", timeline)])
    assert "offload" in svg
    assert "reload" in svg


@pytest.mark.parametrize(("recompute", "kept"), [("none", 100), ("selective", 50), ("full", 10)])
def test_memory_counts_what_stays(recompute, kept):
    plan = plan_of(layers=16, microbatches=4, recompute=recompute, schedule="gpipe")
    plain, moved = compile_step(plan), compile_step(offloading(plan))
    before, after = (high_water(p, sizes_of(p))[0].kept_bytes for p in (plain, moved))
    fields = 4 * 3
    again = 100 if recompute == "full" else 0
    assert before >= 4 * 16 * kept
    assert after <= 3 * max(kept, 103) + again + fields


def test_memory_of_the_units_that_are_named():
    plan = plan_of(layers=16, microbatches=1)
    peaks = [
        high_water(compile_step(each), sizes_of(compile_step(each)))[0].kept_bytes
        for each in (plan, offloading(plan, units=range(1, 9)), offloading(plan))
    ]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[0] - peaks[1] == 8 * 100, "the second pass after an offload waits for it, if no other one follows"


def _broken(program, change):
    return replace(program, ranks=(tuple(change(list(program.ranks[0]))), *program.ranks[1:]))


def _without(kind):
    def change(instructions):
        instructions.remove(next(i for i in instructions if isinstance(i, kind)))
        return instructions

    return change


def _moved(kind, *, after):
    def change(instructions):
        i = next(i for i in instructions if isinstance(i, kind))
        instructions.remove(i)
        goal = next(at for at, other in enumerate(instructions) if after(other, i))
        instructions.insert(goal + 1, i)
        return instructions

    return change


def _is_pass(kind):
    return lambda other, i: isinstance(other, kind) and (other.unit, other.microbatch) == (i.unit, i.microbatch)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (_without(ins.Reload), "is not reloaded before it"),
        (_without(ins.Offload), "only what was offloaded is reloaded"),
        (_moved(ins.Reload, after=_is_pass(ins.Backward)), "is not reloaded before it"),
        (_moved(ins.Reload, after=_is_pass(ins.Forward)), "only what was offloaded is reloaded"),
        (_moved(ins.Offload, after=_is_pass(ins.Backward)), "only what was offloaded is reloaded"),
        (lambda every: [each for i in every for each in ([i, i] if isinstance(i, ins.Offload) else [i])], "once"),
        (lambda every: [ins.Offload(0, 0), *every], "keeps nothing"),
    ],
)
def test_check_refuses(change, rule):
    program = compile_step(offloading(plan_of(layers=6, microbatches=1)))
    with pytest.raises(InvalidProgram, match=rule):
        check(_broken(program, change))


def _shift(timeline, kind, *, start_s, end_s):
    """The timeline with its first event of a kind at another time."""
    first = next(e for e in timeline.events if isinstance(e.instruction, kind))
    other = replace(first, start_s=start_s(first), end_s=end_s(first))
    return Timeline(timeline.program, tuple(other if e is first else e for e in timeline.events))


def test_a_recorded_step_that_breaks_a_rule_is_refused():
    program = compile_step(offloading(plan_of(layers=6, microbatches=1)))
    timeline = simulate(program, seconds_of(program))
    early = _shift(timeline, ins.Reload, start_s=lambda e: 0.0, end_s=lambda e: e.end_s)
    with pytest.raises(InvalidProgram, match="begins before its offload has ended"):
        check_copies(early)
    late = _shift(timeline, ins.Reload, start_s=lambda e: e.start_s, end_s=lambda e: 1e9)
    with pytest.raises(InvalidProgram, match="begins before its reload has ended"):
        check_copies(late)
    long = _shift(timeline, ins.Offload, start_s=lambda e: e.start_s, end_s=lambda e: 2.9)
    with pytest.raises(InvalidProgram, match="begins before the memory that it waits for is free"):
        check_copies(long)


def test_places_are_one_or_one_for_each_unit():
    assert plan_of(layers=2, activations=("device",)).activations == ()
    assert plan_of(layers=2, activations=("disk",)).activations == ("disk",) * 4
    assert plan_of(layers=2, activations=("device", "disk", "device", "device")).offloaded == {1}
    with pytest.raises(ConfigError, match=r"has 2 places and the model 4 units; give one place, or a list of 4"):
        plan_of(layers=2, activations=("disk", "device"))
    with pytest.raises(ConfigError, match=r"'host' on CPU ranks: .* set plan.activations to 'disk'"):
        plan_of(layers=2, activations=("host",), device="cpu")
    with pytest.raises(ConfigError, match=r"plan.reload_ahead = 0 must be at least 1"):
        plan_of(layers=2, activations=("disk",), reload_ahead=0)
