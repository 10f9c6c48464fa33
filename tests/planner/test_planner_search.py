"""The search finds what pricing every plan finds, and its bounds are bounds."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from longer import longer
from planning import everything, problem_of, side_of
from superstep.planner import search as search_module
from superstep.planner.price import by_core_s, by_schedule_s
from superstep.planner.search import search

PROBLEMS = {
    "fast links": problem_of("demo", chips=8, batch=16, sequence=128),
    "two domains": problem_of("llama3.2-1b", chips=8, batch=16, sequence=1024, domain=2),
    "little memory": problem_of("llama3.2-1b", chips=8, batch=16, sequence=1024, memory=6e9),
    "experts": problem_of("demo-moe", chips=4, batch=8, sequence=64, chip="H100"),
    "fp32": problem_of("demo", chips=4, batch=8, sequence=64, chip="V100", compute="fp32"),
    "long": problem_of("qwen3-0.6b", chips=8, batch=2, sequence=32768, chip="H100"),
}


def brute(sides, keep):
    """(seconds, bytes) of the best plan of each of the best meshes, from the price of every plan."""
    best = {}
    for side in sides:
        plans = everything(side)
        seconds, held = side.pricing.seconds(plans).step_s, side.pricing.bytes(plans)
        for mesh, price, size in zip(plans.mesh, seconds, held, strict=True):
            if size <= side.pricing.memory_bytes:
                best[mesh] = min(best.get(mesh, (np.inf, np.inf)), (price, size))
    return sorted(best.values())[:keep]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("keep", longer([5, 1], lambda keep: keep == 1))
def test_the_answer_is_that_of_brute_force(name, keep, monkeypatch):
    """In small pieces, so that a bound ends the search with most of these small spaces unseen."""
    monkeypatch.setattr(search_module, "CHUNK", 256)
    side = side_of(PROBLEMS[name])
    expected = brute([side], keep)
    for is_pruned in (True, False):
        answer = search([side], keep=keep, is_pruned=is_pruned)
        assert [f.step_s for f in answer.best] == pytest.approx([price for price, _ in expected], rel=1e-12)
        assert [f.memory_bytes for f in answer.best] == pytest.approx([size for _, size in expected], rel=1e-12)
        assert answer.plans == len(everything(side))
    assert answer.priced + answer.too_large == answer.plans


def test_pruning_prices_few_plans():
    side = side_of(problem_of("llama3.2-1b", chips=32, batch=64, sequence=2048))
    answer = search([side], keep=5)
    assert answer.priced < answer.plans / 20
    assert answer.best


def test_two_formats_compete():
    half, whole = (side_of(replace(PROBLEMS["fast links"], compute=compute)) for compute in ("bf16", "fp32"))
    for sides in ([half, whole], [whole, half]):
        answer = search(sides, keep=4)
        assert [f.step_s for f in answer.best] == pytest.approx([p for p, _ in brute(sides, 4)], rel=1e-12)
    assert {f.side.problem.compute for f in answer.best} == {"bf16"}


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_plan_is_below_the_bounds_of_its_core(name):
    side = side_of(PROBLEMS[name])
    space, pricing = side.space, side.pricing
    cores = space.cores()
    bound_s, bound_bytes = pricing.core_bound_s(cores), pricing.core_bound_bytes(cores)
    for row in np.random.default_rng(0).permutation(len(cores))[:60]:
        ordered = space.with_schedules(cores.take(np.array([row])))
        plans = space.with_shardings(ordered)
        step_s, held = pricing.seconds(plans).step_s, pricing.bytes(plans)
        assert step_s.min() >= bound_s[row] * (1 - 1e-12)
        assert held.min() >= bound_bytes[row] * (1 - 1e-12)
        orders = np.repeat(pricing.schedule_bound_s(ordered), len(plans) // len(ordered))
        assert (step_s >= orders * (1 - 1e-12)).all()
        least = np.repeat(pricing.schedule_bound_bytes(ordered), len(plans) // len(ordered))
        assert (held >= least * (1 - 1e-12)).all()
        assert (space.count_shardings(ordered) == len(plans) // len(ordered)).all()


@pytest.mark.parametrize("name", ["two domains", "experts"])
def test_what_plans_beside_each_other_share_is_priced_once_to_the_same_bit(name):
    side = side_of(PROBLEMS[name])
    plans = everything(side)
    mixed = np.random.default_rng(0).permutation(len(plans))
    for of in (side.pricing.seconds, side.pricing.predict_memory):
        in_order, out_of_order = of(plans), of(plans.take(mixed))
        for field in fields(in_order):
            first, second = (np.broadcast_to(getattr(e, field.name), len(plans)) for e in (in_order, out_of_order))
            np.testing.assert_array_equal(first[mixed], second)


@pytest.mark.parametrize("name", ["two domains", "experts"])
def test_what_a_level_decides_later_levels_leave(name):
    """The reason that the bounds are bounds: these parts are the same on every schedule and every sharding."""
    side = side_of(PROBLEMS[name])
    cores = side.space.cores().take(np.arange(3))
    for row in range(3):
        plans = side.space.with_shardings(side.space.with_schedules(cores.take(np.array([row]))))
        parts = side.pricing.seconds(plans)
        assert np.ptp(by_core_s(parts)) == pytest.approx(0, abs=1e-12)
        each = by_schedule_s(parts).reshape(len(side.space.with_schedules(cores.take(np.array([row])))), -1)
        assert np.ptp(each, axis=1) == pytest.approx(0, abs=1e-12)


@pytest.mark.long
def test_pieces_do_not_change_the_answer(monkeypatch):
    side = side_of(PROBLEMS["two domains"])
    expected = search([side], keep=3)
    monkeypatch.setattr(search_module, "CHUNK", 7)
    found = search([side], keep=3)
    assert [f.plan.plan_config(0, side.problem) for f in found.best] == [
        f.plan.plan_config(0, side.problem) for f in expected.best
    ]


def test_what_does_not_fit_is_not_found():
    side = side_of(problem_of("llama3.2-1b", chips=2, batch=8, sequence=1024, memory=1e9))
    answer = search([side], keep=3)
    assert answer.best == ()
    assert answer.too_large == answer.plans
