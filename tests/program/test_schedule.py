"""Schedules: the tables that the papers draw, and what holds of all; memory here, time in test_simulate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import SCHEDULES, examples, plan_of
from superstep.plan.sharding.stages import place
from superstep.program.compile import compile_step
from superstep.program.peak_memory import forwards_in_flight
from superstep.program.schedule import StageTask, forward_order, order


def drawn(tasks: tuple[StageTask, ...]) -> str:
    """Tasks as the papers write them: F2.1 is the forward pass of microbatch 2 through stage 1."""
    letters = {"forward": "F", "backward": "B", "input": "B", "weight": "W"}
    return " ".join(f"{letters[t.kind]}{t.microbatch}.{t.stage}" for t in tasks)


@st.composite
def schedules(draw):
    """Arguments of ``order``."""
    name = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 8))
    is_grouped = name in ("interleaved", "breadth-first")
    chunks = draw(st.integers(1, 4)) if is_grouped else 2 if name == "zb-v" else 1
    group = draw(st.integers(pp if chunks > 1 and is_grouped else 1, pp + 3))
    return {
        "name": name,
        "placement": place(name, pp=pp, chunks=chunks),
        "microbatches": group * draw(st.integers(1, 4)),
        "group": group,
    }


@examples(50)
@given(schedules())
def test_each_rank_runs_its_stages_on_every_microbatch_once(arguments):
    kinds = ("forward", "input", "weight") if arguments["name"].startswith("zb") else ("forward", "backward")
    for rank, tasks in enumerate(order(**arguments)):
        assert len(set(tasks)) == len(tasks)
        assert set(tasks) == {
            StageTask(kind, stage, m)
            for kind in kinds
            for stage, place in enumerate(arguments["placement"])
            for m in range(arguments["microbatches"])
            if place == rank
        }


@examples(50)
@given(schedules())
def test_a_rank_takes_back_only_what_it_forwarded(arguments):
    for tasks in order(**arguments):
        place = {task: k for k, task in enumerate(tasks)}
        for task in tasks:
            before = {"backward": "forward", "input": "forward", "weight": "input"}.get(task.kind)
            if before:
                assert place[StageTask(before, task.stage, task.microbatch)] < place[task]


def test_gpipe_is_all_forward_then_all_backward():
    first, second = order("gpipe", placement=(0, 1), microbatches=3, group=3)
    assert drawn(first) == "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0"
    assert drawn(second) == "F0.1 F1.1 F2.1 B0.1 B1.1 B2.1"


def test_1f1b_is_the_table_of_its_docstring():
    first, second = order("1f1b", placement=(0, 1), microbatches=3, group=3)
    assert drawn(first) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert drawn(second) == "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1"


def test_zb_h1_is_the_table_of_its_docstring():
    first, second = order("zb-h1", placement=(0, 1), microbatches=3, group=3)
    assert drawn(first) == "F0.0 F1.0 B0.0 W0.0 F2.0 B1.0 W1.0 B2.0 W2.0"
    assert drawn(second) == "F0.1 B0.1 F1.1 B1.1 W0.1 F2.1 B2.1 W1.1 W2.1"


def test_zb_h1_is_the_upper_half_of_figure_3_of_qi_2023():
    """Four ranks, eight microbatches: the last rank's weights wait for three backward passes."""
    tasks = order("zb-h1", placement=range(4), microbatches=8, group=8)
    assert drawn(tasks[0]).startswith("F0.0 F1.0 F2.0 F3.0 B0.0 W0.0 F4.0 B1.0 W1.0 F5.0")
    assert drawn(tasks[3]).startswith("F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.3 B3.3 W0.3 F4.3 B4.3 W1.3")
    assert drawn(tasks[3]).endswith("F7.3 B7.3 W4.3 W5.3 W6.3 W7.3")


def test_zb_v_turns_on_the_last_rank():
    first, last = order("zb-v", placement=(0, 1, 1, 0), microbatches=3, group=3)
    assert drawn(first) == "F0.0 F1.0 F2.0 F0.3 B0.3 W0.3 F1.3 B1.3 W1.3 B0.0 W0.0 F2.3 B2.3 W2.3 B1.0 W1.0 B2.0 W2.0"
    assert drawn(last) == "F0.1 F0.2 F1.1 F1.2 B0.2 W0.2 F2.1 B0.1 W0.1 F2.2 B1.2 W1.2 B1.1 B2.2 B2.1 W1.1 W2.2 W2.1"


def test_interleaved_is_figure_4_of_narayanan_2021():
    tasks = order("interleaved", placement=(0, 1, 2, 3) * 2, microbatches=8, group=4)
    assert drawn(tasks[0]).startswith(
        "F0.0 F1.0 F2.0 F3.0 F0.4 F1.4 F2.4 F3.4 F4.0 F5.0 F6.0 B0.4 F7.0 B1.4 F4.4 B2.4 F5.4 B3.4"
    )
    assert drawn(tasks[3]).startswith("F0.3 F1.3 F2.3 F3.3 F0.7 B0.7 F1.7 B1.7 F2.7 B2.7 F3.7 B3.7 F4.3 B0.3")


def test_breadth_first_takes_a_group_through_every_stage_of_a_rank():
    tasks = order("breadth-first", placement=(0, 1) * 2, microbatches=4, group=2)
    assert drawn(tasks[1]) == ("F0.1 F1.1 F0.3 F1.3 B0.3 B1.3 B0.1 B1.1 F2.1 F3.1 F2.3 F3.3 B2.3 B3.3 B2.1 B3.1")


def test_an_evaluation_goes_forward_only():
    tasks = forward_order(placement=(0, 1, 0, 1), microbatches=2)
    assert drawn(tasks[0]) == "F0.0 F1.0 F0.2 F1.2"
    assert drawn(tasks[1]) == "F0.1 F1.1 F0.3 F1.3"
    tasks = forward_order(placement=(0, 1, 1, 0), microbatches=2)
    assert drawn(tasks[0]) == "F0.0 F1.0 F0.3 F1.3"


@examples(60)
@given(arguments=schedules())
def test_forwards_in_flight_are_the_closed_form(arguments):
    name, placement, m, group = (arguments[key] for key in ("name", "placement", "microbatches", "group"))
    pp = max(placement) + 1
    chunks = len(placement) // pp
    if name == "zb-v":
        # The pattern cut short has no closed form.
        m = max(m, 2 * pp - 1)
    program = compile_step(
        plan_of(
            pp=pp,
            chunks=chunks,
            schedule=name,
            layers=pp * chunks,
            microbatches=m,
            microbatch_group=group if name in ("interleaved", "breadth-first") else None,
        )
    )
    expected = {
        "gpipe": lambda rank: m,
        "1f1b": lambda rank: min(pp - rank, m),
        "interleaved": lambda rank: min(2 * (pp - rank - 1) + (chunks - 1) * group + 1, chunks * m),
        "breadth-first": lambda rank: chunks * group,
        "zb-h1": lambda rank: min(pp, m),
        "zb-v": lambda rank: 2 * pp,
    }[name]
    assert forwards_in_flight(program) == tuple(map(expected, range(pp)))


@pytest.mark.parametrize("m", range(1, 12))
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_zero_bubble_keeps_no_more_than_the_first_rank_of_1f1b(pp, m):
    most = max(forwards_in_flight(compile_step(plan_of(pp=pp, layers=pp, microbatches=m))))
    h1 = compile_step(plan_of(pp=pp, layers=pp, microbatches=m, schedule="zb-h1"))
    assert max(forwards_in_flight(h1)) == most
    # A stage of the V is half as large.
    v = compile_step(plan_of(pp=pp, chunks=2, layers=2 * pp, microbatches=m, schedule="zb-v"))
    assert max(forwards_in_flight(v)) == 2 * most


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_more_microbatches_need_no_more_memory(pp, schedule, chunks):
    layout = {"pp": pp, "chunks": chunks, "layers": pp * chunks, "schedule": schedule}
    few, many = (compile_step(plan_of(**layout, microbatches=m)) for m in (2 * pp, 8 * pp))
    assert forwards_in_flight(few) == forwards_in_flight(many)
