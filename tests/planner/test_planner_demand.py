"""Where there is no plan, what the planner says would have one has one; and what is offered beside the best holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning import problem_of, side_of
from superstep.cost.program.flops import model_flops_per_token
from superstep.errors import ConfigError
from superstep.planner.feasibility import check_problem, nearest_batch, smallest, smallest_cluster
from superstep.planner.plan_summary import figures, limits, shares
from superstep.planner.search import search
from superstep.planner.search_problem import Rule
from superstep.planner.sensitivity import fallbacks, improve, neighbours, simplicity_of
from superstep.planner.simulate_best import verify
from superstep.planner.tie_break import TIE


def with_batch(problem, sequences):
    return replace(problem, base=replace(problem.base, train=replace(problem.base.train, batch_sequences=sequences)))


@pytest.mark.parametrize(("chips", "batch"), [(7, 20), (22, 100), (13, 3), (26, 40)])
def test_the_nearest_batch_is_divided_and_none_nearer_is(chips, batch):
    problem = problem_of("demo", chips=chips, batch=batch, domain=1)
    with pytest.raises(ConfigError, match=f"--global-batch = {batch} sequences: no layout of {chips} chips"):
        check_problem(problem)
    near = nearest_batch(problem)
    check_problem(with_batch(problem, near))
    for other in range(max(1, batch - abs(near - batch) + 1), batch + abs(near - batch)):
        with pytest.raises(ConfigError):
            check_problem(with_batch(problem, other))


def test_a_rule_that_no_layout_keeps_is_named_with_what_works():
    problem = problem_of("demo", chips=8, rules=(Rule("tp", 4), Rule("pp", 1)))
    with pytest.raises(ConfigError) as caught:
        check_problem(problem)
    assert "plan.tp = 4" in str(caught.value)
    assert "set plan.tp to one of [1, 2]" in str(caught.value)


@pytest.mark.parametrize(("name", "memory"), [("llama3.2-1b", 4e9), ("qwen3-30b-a3b", 9e9)])
def test_the_smallest_cluster_fits_and_one_node_less_does_not(name, memory):
    problem = problem_of(name, chips=2, batch=64, sequence=1024, memory=memory, domain=2, layers=8)
    side = side_of(problem)
    assert search([side], keep=1).best == ()
    chips = smallest_cluster([side])
    assert chips is not None
    assert search([side_of(problem.on(chips))], keep=1).best
    assert not search([side_of(problem.on(chips - 2))], keep=1).best


def test_no_cluster_is_enough_where_one_layer_is_too_large():
    assert smallest_cluster([side_of(problem_of("llama3-70b", chips=8, batch=8, sequence=8192, memory=1e6))]) is None


def test_the_smallest_plan_is_no_larger_than_any():
    side = side_of(problem_of("llama3.2-1b", chips=8, batch=8, sequence=1024))
    least = smallest(side)
    assert least.bytes <= min(found.memory_bytes for found in search([side], keep=8).best)
    assert least.category in ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace")


@pytest.fixture(scope="module")
def best():
    (found,) = search([side_of(problem_of("llama3.2-1b", chips=16, batch=32, sequence=2048))], keep=1).best
    return verify(found)


def test_neighbours_differ_in_their_field_and_none_improves_the_improved(best):
    first, beside = improve(best)
    assert first.step_s <= best.step_s * (1 + TIE)
    assert {each.field for each in beside} >= {"tp", "zero"}
    for each in beside:
        assert getattr(first.run.config.plan, each.field) != each.value
        assert getattr(each.plan.run.config.plan, each.field) == each.value
        assert each.slower >= -TIE
        assert each.slower > 0 or simplicity_of(first) <= simplicity_of(each.plan)
        assert each.plan.memory_bytes <= best.priced.side.problem.memory_bytes
        assert first.memory_bytes - each.plan.memory_bytes == each.spared_bytes
    plans = [each.plan.run.plan for each in beside]
    assert len(set(plans)) == len(plans)


def test_a_plan_of_the_table_is_no_faster_than_the_alternatives():
    problem = problem_of("llama3.2-1b", chips=16, batch=64, sequence=2048)
    known = [verify(each) for each in search([side_of(problem)], keep=8).best]
    known = sorted((e for e in known if e.memory_bytes <= problem.memory_bytes), key=lambda each: each.step_s)
    beside = list(neighbours(known[0], known))
    told = {each.plan.run.plan for each in beside}
    for each in beside:
        others = [k for k in known if getattr(k.run.config.plan, each.field) == each.value]
        assert all(k.step_s >= each.plan.step_s or k.run.plan in told for k in others if k is not known[0])


def test_neighbours_keep_what_is_settled():
    problem = problem_of("llama3.2-1b", chips=8, batch=32, sequence=1024, rules=(Rule("pp", 2),))
    (found,) = search([side_of(problem)], keep=1).best
    assert {each.plan.run.plan.mesh.pp for each in neighbours(verify(found))} == {2}


def test_fallbacks_use_what_is_left_and_keep_the_batch():
    problem = problem_of("llama3.2-1b", chips=16, batch=32, sequence=1024, domain=4)
    found = list(fallbacks([problem], 4))
    assert [each.lost for each in found] == [1, 2, 3, 4]
    # Twelve chips are a layout with pp = 3 or not at all; none has nothing to run on.
    for each in found[:3]:
        assert each.verified is not None
        assert each.chips <= 16 - 4 * each.lost
        assert each.verified.run.plan.mesh.world == each.chips
        assert each.verified.run.config.train.batch_sequences == 32
        assert each.verified.is_simulated
    assert (found[3].chips, found[3].verified) == (0, None)


@pytest.mark.parametrize("less_bytes", [0, 1, 2**20])
def test_a_fallback_whose_program_fits_by_a_hair_is_taken_and_one_that_is_a_byte_too_large_is_not(less_bytes):
    problem = problem_of("llama3.2-1b", chips=16, batch=32, sequence=1024, domain=4)
    (free,) = fallbacks([problem], 1)
    most = free.verified.memory_bytes
    (found,) = fallbacks([replace(problem, memory_bytes=most - less_bytes)], 1)
    assert found.verified.memory_bytes <= most - less_bytes
    assert (found.verified.run.plan == free.verified.run.plan) == (less_bytes == 0)


def test_where_the_closed_form_promises_a_fallback_and_no_program_fits_there_is_none():
    problem = problem_of("demo", chips=4, batch=16, sequence=256, domain=1)
    (free,) = fallbacks([problem], 1)
    (found,) = fallbacks([replace(problem, memory_bytes=0.4 * free.verified.memory_bytes)], 1)
    assert found.verified is None or found.verified.memory_bytes <= 0.4 * free.verified.memory_bytes


def test_figures_follow_from_the_step(best):
    problem = best.priced.side.problem
    found = figures(best, tokens=1e12, price_per_chip_hour=2.0)
    assert found.tokens_per_s == pytest.approx(32 * 2048 / best.step_s)
    assert found.run_s == pytest.approx(1e12 / found.tokens_per_s)
    assert found.price == pytest.approx(found.run_s / 3600 * 2.0 * 16)
    assert found.energy_j == pytest.approx(found.run_s * 16 * problem.cluster.chip.power_w)
    flops = model_flops_per_token(problem.shape, 2048) * 32 * 2048 / best.step_s
    assert found.mfu == pytest.approx(flops / 16 / 312e12)
    assert found.memory_bytes + found.headroom_bytes == problem.memory_bytes
    assert sum(shares(best).values()) == pytest.approx(1)
    assert all(share <= 1 for _, share in limits(best))
    unknown = figures(best, tokens=None, price_per_chip_hour=None)
    assert (unknown.run_s, unknown.energy_j, unknown.price) == (None, None, None)
