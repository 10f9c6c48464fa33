"""The space of plans holds what resolves, and nothing that does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning import everything, problem_of, side_of
from plans import examples
from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig
from superstep.plan.resolution.resolve import resolve
from superstep.planner.plan_columns import run_config
from superstep.planner.search_problem import FIELDS, Rule

PROBLEMS = {
    "dense": problem_of("demo", chips=8, batch=12, sequence=96),
    "odd": problem_of("demo", chips=6, batch=18, sequence=60, layers=5),
    "experts": problem_of("demo-moe", chips=8, batch=8, sequence=64),
    "one chip": problem_of("demo", chips=1, batch=6, sequence=64),
    "padded": problem_of("demo", chips=8, batch=12, sequence=96, vocab=2047),
    "sliding": problem_of("mistral-7b", chips=4, batch=2, sequence=8192, layers=2),
    "queries": problem_of("demo", chips=16, batch=4, sequence=128, heads=8, kv_heads=4),
}
WHOLE = {name: everything(side_of(problem)) for name, problem in PROBLEMS.items()}
HELD = {name: {plans.plan_config(row, PROBLEMS[name]) for row in range(len(plans))} for name, plans in WHOLE.items()}
VALUES = {
    "pp": [1, 2, 3, 4],
    "dp": [1, 2, 3, 4, 6, 8],
    "cp": [1, 2, 3, 4],
    "tp": [1, 2, 3, 4, 8],
    "ep": [1, 2, 4, 8],
    "zero": [0, 1, 2, 3],
    "replicas": [1, 2, 3, 4],
    "schedule": ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v"],
    "chunks": [1, 2, 3, 4, 5],
    "context": ["ring", "ulysses"],
    "microbatch": [1, 2, 3, 4],
    "microbatch_group": [None, 1, 2, 3, 4, 6],
    "recompute": ["none", "selective", "full"],
    "sequence_parallel": [True, False],
}


def is_legal(plan, problem):
    try:
        resolve(run_config(plan, problem), problem.cluster.chips)
    except ConfigError:
        return False
    return True


def as_held(plan: PlanConfig, problem) -> PlanConfig:
    """The plan of the space that does the same: what changes nothing is as it is by default."""
    full = resolve(run_config(plan, problem)).config.plan
    if full.tp == 1:
        full = replace(full, sequence_parallel=True)
    if full.cp == 1:
        full = replace(full, context="ring")
    data = full.dp * full.cp
    alike = data * full.tp // full.ep if problem.shape.moe else 1
    if full.zero and max(data, alike) == 1:
        full = replace(full, zero=0)
    microbatches = problem.batch_sequences // full.dp // full.microbatch
    if full.schedule == "breadth-first" and full.chunks == 1 and full.microbatch_group == microbatches:
        full = replace(full, schedule="gpipe", microbatch_group=None)
    return full


def is_left_out(plan: PlanConfig, problem) -> bool:
    """What the space leaves out, though it is legal."""
    if plan.pp == 1 and plan.schedule not in ("1f1b", "gpipe"):
        return plan.schedule != "breadth-first" or plan.chunks != problem.shape.layers
    return plan.schedule == "interleaved" and plan.chunks == 1


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_plan_is_held_twice(name):
    assert len(HELD[name]) == len(WHOLE[name])
    assert len(WHOLE[name]) > 10


@examples(150)
@given(st.data())
def test_every_plan_of_the_space_resolves(data):
    name = data.draw(st.sampled_from(list(PROBLEMS)))
    plans, problem = WHOLE[name], PROBLEMS[name]
    row = data.draw(st.integers(0, len(plans) - 1))
    run = resolve(run_config(plans.plan_config(row, problem), problem), problem.cluster.chips)
    assert run.plan.microbatches == plans.microbatches[row]
    assert run.plan.mesh.shards("dense") == plans.layout.shards[row]


@examples(500)
@given(st.data())
def test_a_neighbour_is_in_the_space_where_it_resolves_and_only_there(data):
    """Up to three fields of a plan are changed; most such plans cannot work."""
    name = data.draw(st.sampled_from(list(PROBLEMS)))
    problem, plans = PROBLEMS[name], WHOLE[name]
    plan = plans.plan_config(data.draw(st.integers(0, len(plans) - 1)), problem)
    for field in data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True)):
        plan = replace(plan, **{field: data.draw(st.sampled_from(VALUES[field]))})
    if not is_legal(plan, problem):
        assert plan not in HELD[name]
        return
    held = as_held(plan, problem)
    assert is_left_out(held, problem) == (held not in HELD[name])


@pytest.mark.parametrize(
    ("field", "value"),
    [("tp", 2), ("zero", 3), ("schedule", "zb-v"), ("microbatch_group", None), ("sequence_parallel", False), ("pp", 2)],
)
def test_a_rule_leaves_what_it_admits(field, value):
    problem = PROBLEMS["dense"]
    ruled = {is_wanted: replace(problem, rules=(Rule(field, value, is_wanted),)) for is_wanted in (True, False)}
    wanted, unwanted = (everything(side_of(ruled[is_wanted])) for is_wanted in (True, False))
    assert {getattr(wanted.plan_config(row, problem), field) for row in range(len(wanted))} == {value}
    # Where tp = 1 a split sequence and a whole one are the same, so the rule finds a plan for either.
    assert len(wanted) + len(unwanted) >= len(WHOLE["dense"])
    assert value not in {getattr(unwanted.plan_config(row, problem), field) for row in range(len(unwanted))}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_count_is_the_length(name):
    space = side_of(PROBLEMS[name]).space
    assert space.count(space.cores()).sum() == len(WHOLE[name])


def test_meshes_have_numbers_of_their_own():
    plans = WHOLE["experts"]
    meshes = {(p.pp, p.cp, p.tp, p.ep) for p in HELD["experts"]}
    assert len(np.unique(plans.mesh)) == len(meshes)
