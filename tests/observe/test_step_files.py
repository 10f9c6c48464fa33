"""A step as SVG and as a trace: every instruction is in them, as often and as long as it ran."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.util import find_spec

import pytest
from hypothesis import given

import step_pages
from plans import examples, plan_of, plans
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.observe.chrome_trace import chrome_trace
from superstep.observe.drawing.step_svg import FORWARD, LEFT, RIGHT, WIDTH, caption_of, draw_svg
from superstep.program.compile import compile_step
from superstep.program.instructions import Send, lane
from superstep.program.peak_memory import course
from superstep.program.text import describe

SVG = "{http://www.w3.org/2000/svg}"
SHELL = shutil.which("trace_processor_shell")


def timeline_of(plan, **seconds):
    program = compile_step(plan)
    unit = UnitSeconds(**{"forward_s": 1e-3, "backward_s": 2e-3, "weight_s": 1e-3, "recompute_s": 1e-3} | seconds)
    return simulate(program, PerUnit(units=(unit,) * len(program.units), step_s=5e-4))


@examples(25)
@given(plans())
def test_a_trace_has_every_instruction_once_and_an_arrow_for_every_transfer(plan):
    timeline = timeline_of(plan, fetch_s=5e-4, reduce_s=3e-4, transfer_s=1.25e-4)
    found = json.loads(chrome_trace(timeline, name="a step"))["traceEvents"]
    slices = [e for e in found if e["ph"] == "X"]
    told = {(e["pid"], e["args"]["instruction"]): e for e in slices}
    assert len(told) == len(slices) == len(timeline.events)
    for e in timeline.events:
        one = told[e.rank, e.index]
        assert one["name"] == describe(e.instruction)
        assert (one["cat"], one["ts"] / 1e6) == (e.lane, pytest.approx(e.start_s - timeline.start_s))
        assert one["dur"] / 1e6 == pytest.approx(e.end_s - e.start_s)
    starts, ends = (Counter(e["id"] for e in found if e["ph"] == ph) for ph in "sf")
    assert starts == ends
    assert set(starts.values()) <= {1}
    assert len(starts) == sum(isinstance(e.instruction, Send) for e in timeline.events)
    # An arrow begins and ends in the slice of its rank, lane and time.
    places = {(e["name"][:5], e["pid"], e["tid"], e["ts"]) for e in slices}
    names = {"s": "send ", "f": "recv "}
    assert {(names[e["ph"]], e["pid"], e["tid"], e["ts"]) for e in found if e["ph"] in names} <= places


def test_a_trace_of_a_run_has_both_steps_and_the_memory_of_each():
    one = step_pages.drawn(step_pages.A_RUN, is_measured=True)
    program = one.timeline.program
    courses = [course(program, rank, one.sizes) for rank in range(program.pp)]
    found = json.loads(chrome_trace(one.measured, name="run", courses=courses, predicted=one.timeline))["traceEvents"]
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names == ["run: rank 0", "run: rank 1", "run, predicted: rank 0", "run, predicted: rank 1"]
    for pid in range(4):
        held = [sum(e["args"].values()) for e in found if e["ph"] == "C" and e["pid"] == pid]
        peaks = [peak.bytes for peak in courses[pid % 2]]
        assert 0 < max(held) <= max(peaks)
        assert len(held) == sum(lane(i) == "compute" for i in program.ranks[pid % 2])


@pytest.mark.skipif(find_spec("perfetto") is None or SHELL is None, reason="no perfetto with trace_processor_shell")
def test_perfetto_counts_what_ran(tmp_path):
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    one = step_pages.drawn(step_pages.A_RUN)
    path = tmp_path / "trace.json"
    path.write_text(chrome_trace(one.timeline, name="a step"), encoding="utf-8")
    with TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=SHELL)) as processor:
        (row,) = processor.query("select count(*) as slices from slice")
        assert row.slices == len(one.timeline.events)
        (row,) = processor.query("select count(*) as flows from flow")
        assert row.flows == sum(isinstance(e.instruction, Send) for e in one.timeline.events)


def test_an_svg_draws_every_pass_at_its_place_and_says_the_bubble():
    plan = plan_of(pp=2, microbatches=3, layers=4)
    timeline = timeline_of(plan)
    caption = caption_of("<a & b>", timeline, closed=1 / 3, formula="(p - 1) / m")
    root = ET.fromstring(draw_svg([(caption, timeline)]))
    texts = [one.text for one in root.iter(f"{SVG}text")]
    said = f"<a & b>: {timeline.step_s * 1e3:.4g} ms, bubble {timeline.bubble():.1%} of compute"
    assert texts[0] == f"{said} (closed form (p - 1) / m = 33.3%)"
    scale = (WIDTH - LEFT - RIGHT) / timeline.step_s
    forward = sorted(
        (round(float(one.get("x")), 1), round(float(one.get("width")), 1))
        for one in root.iter(f"{SVG}rect")
        if one.get("fill") in FORWARD.fills and one.get("height") == "16"
    )
    expected = sorted(
        (round(LEFT + e.start_s * scale, 1), round((e.end_s - e.start_s) * scale, 1))
        for e in timeline.events
        if describe(e.instruction).startswith("forward")
    )
    assert len(forward) == len(expected)
    assert sum(forward, ()) == pytest.approx(sum(expected, ()), abs=0.11)
    assert {"0", "1", "2", "rank 0", "rank 1", "bubble", "backward"} <= set(texts)


def test_an_svg_of_many_microbatches_stays_small():
    timeline = timeline_of(plan_of(pp=2, microbatches=800, layers=2), forward_s=1e-4, backward_s=2e-4)
    assert len(timeline.events) > 9_000
    assert len(draw_svg([("many", timeline)])) < 300_000
