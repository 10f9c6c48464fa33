"""The drawing of a step's memory over time."""

from __future__ import annotations

import pytest

from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.observe.drawing.memory import ASCII, GUTTER, LEVELS, draw_memory
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.peak_memory import course, high_water


def drawn(*, has_signs=True, width=120, **plan):
    world = plan.get("pp", 1) * plan.get("dp", 1)
    run = resolve(
        RunConfig(
            model=ModelConfig(name="tiny", layers=6),
            data=DataConfig(sequence_tokens=64),
            train=TrainConfig(batch_sequences=8),
            plan=PlanConfig(microbatch=1, **plan),
        ),
        world,
    )
    program = compile_step(run.plan)
    sizes = unit_bytes(run)
    timeline = simulate(program, PerUnit(units=(UnitSeconds(forward_s=1, backward_s=2),) * len(sizes)))
    courses = [course(program, rank, sizes) for rank in range(program.pp)]
    return program, sizes, courses, draw_memory(timeline, courses, width=width, text=str, has_signs=has_signs)


def row(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_highest_level_of_a_course_is_the_peak(schedule):
    program, sizes, courses, text = drawn(pp=2, schedule=schedule)
    for rank, peak in enumerate(high_water(program, sizes)):
        assert max(level.bytes for level in courses[rank]) == peak.bytes
        assert courses[rank][peak.index] == peak
        most = max(level.kept_bytes for level in courses[rank])
        assert row(text, f"rank {rank}  kept activations").endswith(f"  {most}")


def test_gpipe_rises_to_the_middle_and_falls():
    *_, text = drawn(pp=2, schedule="gpipe")
    levels = [LEVELS.index(sign) for sign in row(text, "rank 0  kept activations")[GUTTER:].rsplit("  ", 1)[0]]
    top = levels.index(max(levels))
    assert levels[:top] == sorted(levels[:top])
    assert levels[top:] == sorted(levels[top:], reverse=True)
    assert max(levels) == len(LEVELS) - 1


def test_categories_that_nobody_holds_have_no_row():
    assert "gathered parameters" not in drawn(pp=2)[-1]
    with_shards = drawn(dp=2, zero=3)[-1]
    assert "gathered parameters" in with_shards
    assert "whole gradients" in with_shards


def test_a_plain_terminal_gets_plain_signs():
    *_, text = drawn(pp=2, has_signs=False)
    assert text.isascii()
    assert ASCII[-1] in text


def test_rows_keep_to_the_width():
    *_, text = drawn(pp=2, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
