"""Schedules: the tables that the papers draw, and what holds of all; memory here, time in test_simulate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import examples, plan_of
from superstep.program.compile import compile_step
from superstep.program.memory import forwards_in_flight
from superstep.program.schedule import Task, forward_order, order


def drawn(tasks: tuple[Task, ...]) -> str:
    """Tasks as the papers write them: F2.1 is the forward pass of microbatch 2 through stage 1."""
    return " ".join(f"{'F' if t.is_forward else 'B'}{t.microbatch}.{t.stage}" for t in tasks)


@st.composite
def schedules(draw):
    """Arguments of ``order``."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "breadth-first"]))
    pp = draw(st.integers(1, 8))
    chunks = draw(st.integers(1, 4)) if name in ("interleaved", "breadth-first") else 1
    group = draw(st.integers(pp if chunks > 1 else 1, pp + 3))
    return {
        "name": name,
        "pp": pp,
        "chunks": chunks,
        "microbatches": group * draw(st.integers(1, 4)),
        "group": group,
    }


@examples(50)
@given(schedules())
def test_each_rank_runs_its_stages_on_every_microbatch_once(arguments):
    for rank, tasks in enumerate(order(**arguments)):
        assert len(set(tasks)) == len(tasks)
        assert set(tasks) == {
            Task(is_forward=is_forward, stage=rank + arguments["pp"] * chunk, microbatch=m)
            for is_forward in (True, False)
            for chunk in range(arguments["chunks"])
            for m in range(arguments["microbatches"])
        }


@examples(50)
@given(schedules())
def test_a_rank_takes_back_only_what_it_forwarded(arguments):
    for tasks in order(**arguments):
        place = {task: k for k, task in enumerate(tasks)}
        for task in tasks:
            if not task.is_forward:
                forward = Task(is_forward=True, stage=task.stage, microbatch=task.microbatch)
                assert place[forward] < place[task]


def test_gpipe_is_all_forward_then_all_backward():
    first, second = order("gpipe", pp=2, chunks=1, microbatches=3, group=3)
    assert drawn(first) == "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0"
    assert drawn(second) == "F0.1 F1.1 F2.1 B0.1 B1.1 B2.1"


def test_1f1b_is_the_table_of_its_docstring():
    first, second = order("1f1b", pp=2, chunks=1, microbatches=3, group=3)
    assert drawn(first) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert drawn(second) == "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1"


def test_interleaved_is_figure_4_of_narayanan_2021():
    tasks = order("interleaved", pp=4, chunks=2, microbatches=8, group=4)
    assert drawn(tasks[0]).startswith(
        "F0.0 F1.0 F2.0 F3.0 F0.4 F1.4 F2.4 F3.4 F4.0 F5.0 F6.0 B0.4 F7.0 B1.4 F4.4 B2.4 F5.4 B3.4"
    )
    assert drawn(tasks[3]).startswith("F0.3 F1.3 F2.3 F3.3 F0.7 B0.7 F1.7 B1.7 F2.7 B2.7 F3.7 B3.7 F4.3 B0.3")


def test_breadth_first_takes_a_group_through_every_stage_of_a_rank():
    tasks = order("breadth-first", pp=2, chunks=2, microbatches=4, group=2)
    assert drawn(tasks[1]) == ("F0.1 F1.1 F0.3 F1.3 B0.3 B1.3 B0.1 B1.1 F2.1 F3.1 F2.3 F3.3 B2.3 B3.3 B2.1 B3.1")


def test_an_evaluation_goes_forward_only():
    tasks = forward_order(pp=2, chunks=2, microbatches=2)
    assert drawn(tasks[0]) == "F0.0 F1.0 F0.2 F1.2"
    assert drawn(tasks[1]) == "F0.1 F1.1 F0.3 F1.3"


@examples(60)
@given(arguments=schedules())
def test_forwards_in_flight_are_the_closed_form(arguments):
    name, pp, chunks, m = (arguments[key] for key in ("name", "pp", "chunks", "microbatches"))
    group = arguments["group"]
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
    }[name]
    assert forwards_in_flight(program) == tuple(map(expected, range(pp)))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_1f1b_needs_no_more_memory_for_more_microbatches(pp):
    few, many = (compile_step(plan_of(pp=pp, layers=pp, microbatches=m)) for m in (pp, 4 * pp))
    assert forwards_in_flight(few) == forwards_in_flight(many)
