"""The page of a step: its columns against the program, its closed forms against the simulator; and it is one file."""

from __future__ import annotations

import re
from itertools import accumulate

import pytest
from hypothesis import given

from plans import SCHEDULES, examples, plan_of, plans
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory import rank_bytes
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.observe.page.bubble import PassSeconds, compute_closed_bubble
from superstep.observe.page.bundle_html import pack, unpack
from superstep.observe.page.step_animation import ChooserEntry, moving_page
from superstep.observe.page.step_data import KINDS, LANES, StepDrawing, fields, step_value
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.instructions import Recv, Send, lane
from superstep.program.peak_memory import UnitBytes, course
from superstep.program.timeline import Timeline

SIZE = UnitBytes(
    params=7, gradient=11, kept_all=101, kept_selective=53, kept_input=13, product_inputs=31, product_gradients=37,
    boundary=17,
)  # fmt: skip


def timeline_of(plan, **seconds):
    program = compile_step(plan)
    unit = UnitSeconds(**{"forward_s": 1e-3, "backward_s": 2e-3, "weight_s": 1e-3} | seconds)
    return simulate(program, PerUnit(units=(unit,) * len(program.units), step_s=5e-4, reduce_partial_s=2e-4))


def value_of(plan, timeline, measured=None):
    sizes = [SIZE] * len(plan.units)
    return unpack(
        pack(step_value(StepDrawing(plan=plan, timeline=timeline, memory=(), sizes=sizes, measured=measured)))
    )


@examples(25)
@given(plans())
def test_columns_are_the_program_instruction_by_instruction(plan):
    timeline = timeline_of(plan, recompute_s=1e-3, fetch_s=5e-4, reduce_s=3e-4, transfer_s=1.25e-4, tie_s=5e-4)
    slower = Timeline(timeline.program, timeline.events)
    value = value_of(plan, timeline, slower)
    program = timeline.program
    assert len(value["ranks"]) == program.pp
    for rank, columns in enumerate(value["ranks"]):
        told = list(zip(columns["kind"], columns["unit"], columns["microbatch"], columns["peer"], strict=True))
        assert told == [fields(i) for i in program.ranks[rank]]
        for i, kind, wire in zip(program.ranks[rank], columns["kind"], columns["wire"], strict=True):
            assert type(i) is KINDS[kind]
            if isinstance(i, Send | Recv):
                assert lane(i) == LANES[3 + wire]
        for times in (value["predicted"], value["measured"]):
            starts = list(accumulate(times["ranks"][rank]["start"]))
            ends = [start + took for start, took in zip(starts, times["ranks"][rank]["took"], strict=True)]
            for e in timeline.of(rank):
                assert starts[e.index] == round(e.start_s * 1e9)
                assert ends[e.index] == round(e.end_s * 1e9)
            waits = times["ranks"][rank]
            assert list(accumulate(waits["wait"])) == [round(w.start_s * 1e9) for w in timeline.waits(rank)]
            assert [None if w < 0 else LANES[w] for w in waits["for"]] == [w.lane for w in timeline.waits(rank)]
        levels = [value["levels"][number] for number in columns["level"]]
        parts = [list(accumulate(part)) for part in zip(*levels, strict=True)]
        held = course(program, rank, [SIZE] * len(plan.units))
        assert parts == [
            [peak.params_bytes for peak in held],
            [peak.gradient_bytes for peak in held],
            [peak.kept_bytes for peak in held],
            [peak.boundary_bytes for peak in held],
            [peak.workspace_bytes for peak in held],
        ]
        parts_ns = value["predicted"]["busy_ns"][rank] + value["predicted"]["bubble_ns"][rank]
        parts_ns += sum(value["predicted"]["exposed_ns"][rank].values())
        assert parts_ns == pytest.approx(value["predicted"]["step_ns"], abs=10)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_closed_form_is_what_the_simulator_finds_for_even_stages(schedule):
    pp, m = 4, 8
    chunks = 2 if schedule in ("interleaved", "breadth-first", "zb-v") else 1
    each = 8 // (pp * chunks)
    stages = (each + 1, *[each] * (pp * chunks - 2), each + 1)
    plan = plan_of(layers=8, microbatches=m, pp=pp, chunks=chunks, schedule=schedule, stages=stages)
    program = compile_step(plan)
    block = UnitSeconds(forward_s=1e-3, backward_s=2e-3, weight_s=1e-3)
    end = UnitSeconds(forward_s=0.0, backward_s=0.0)
    found = simulate(program, PerUnit(units=(end, *[block] * 8, end)))
    value = value_of(plan, found)["predicted"]
    assert value["closed"] == pytest.approx(value["bubble"])
    assert value["bubble"] == pytest.approx(found.bubble())
    assert 0 < value["closed"] < 0.5


def test_breadth_first_fills_and_drains_for_each_of_its_groups():
    passes = PassSeconds(forward_s=1.0, input_s=1.0, weight_s=1.0)
    whole = compute_closed_bubble("breadth-first", pp=4, chunks=2, microbatches=8, passes=passes)
    assert compute_closed_bubble("breadth-first", pp=4, chunks=2, microbatches=8, passes=passes, group=4) == 2 * whole


def config(**layout):
    return RunConfig(
        model=ModelConfig(name="tiny", layers=4), train=TrainConfig(batch_sequences=8), plan=PlanConfig(**layout)
    )


def drawn(**layout):
    run = resolve(config(microbatch=1, **layout))
    timeline = timeline_of(run.plan)
    memory = rank_bytes(run, timeline.program)
    return StepDrawing(plan=run.plan, timeline=timeline, memory=memory, sizes=unit_bytes(run))


def test_a_page_is_one_file_that_asks_for_nothing_and_keeps_what_it_is_told_as_text():
    hostile = "</script><script>alert(1)</script><!--"
    choices = [
        ChooserEntry(schedule="1f1b", zero=0, drawn=drawn(pp=2, zero=0)),
        ChooserEntry(schedule="zb-v", zero=0, drawn=None, why=hostile),
    ]
    page = moving_page(hostile, hostile, choices, 0)
    assert "alert(1)</script>" not in page
    # One script of data, one that draws.
    assert len(re.findall("<script", page)) == 2
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|@import|url\(|https?://""", page)
    assert "default-src 'none'" in page
