"""Of plans that no formula tells apart the simplest is taken."""

from __future__ import annotations

from planning import problem_of, side_of
from superstep.planner import shortlist as candidates_module
from superstep.planner.search import search
from superstep.planner.sensitivity import improve, of_kinds, simplicity_of
from superstep.planner.shortlist import candidates, kind_of
from superstep.planner.simulate_best import instructions_of, verify
from superstep.planner.tie_break import TIE, first_of, simplicity, tie_places

PLAIN, SPLIT, AGAIN = (simplicity(*each) for each in (((1, 1), 0, 0.9), ((2, 4), 0, 0.3), ((1, 1), 2, 0.3)))


def test_the_simplest_of_those_tied_is_taken_and_of_equals_the_faster():
    seconds = [1.0, 1.0 + TIE / 2, 1.0 + TIE * 1.1]
    assert tie_places(seconds) == [0, 1]
    assert first_of(seconds, [SPLIT, PLAIN, PLAIN]) == 1
    assert first_of(seconds, [SPLIT, SPLIT, PLAIN]) == 0
    # Fewer axes before less recomputation, that before memory.
    assert first_of([1.0, 1.0, 1.0], [AGAIN, SPLIT, PLAIN]) == 2
    assert first_of([1.0, 1.0], [AGAIN, SPLIT]) == 0
    assert first_of([1.0, 1.01], [simplicity((1,), 0, 0.80), simplicity((1,), 0, 0.79)]) == 0


def test_the_planner_takes_the_simplest_of_the_fastest():
    side = side_of(problem_of("llama3.2-1b", chips=16, batch=64, sequence=2048))
    plans = sorted((verify(each) for each in search([side], keep=6).best), key=lambda plan: plan.step_s)
    first, beside = improve(plans[0], plans)
    near = [plans[0], *plans, *(each.plan for each in beside)]
    least = min(each.step_s for each in near)
    assert first.step_s <= least * (1 + TIE)
    assert simplicity_of(first) <= min(simplicity_of(each) for each in near if each.step_s <= least * (1 + TIE))
    assert all(each.slower > -TIE for each in beside)


def test_the_first_answer_prices_a_program_of_each_kind_as_far_as_its_budget_goes(monkeypatch):
    side = side_of(problem_of("llama3.2-1b", chips=16, batch=64, sequence=2048))
    best = search([side], keep=12).best
    chosen = candidates(best)
    assert chosen[0] is best[0]
    kinds = [kind_of(each) for each in chosen]
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) == {kind_of(each) for each in best}
    costs = {id(each): instructions_of(verify(each).run) for each in best}
    monkeypatch.setattr(candidates_module, "BUDGET", costs[id(best[0])] + min(costs.values()))
    few = candidates(best)
    assert few[0] is best[0]
    assert len(few) < len(chosen)
    assert sum(costs[id(each)] for each in few) <= candidates_module.BUDGET
    monkeypatch.setattr(candidates_module, "BUDGET", 0)
    assert candidates(best) == [best[0]]


def test_plans_of_a_kind_are_shown_once():
    side = side_of(problem_of("llama3.2-1b", chips=16, batch=64, sequence=2048))
    plans = [verify(each) for each in search([side], keep=12).best]
    shown = of_kinds(plans)
    assert shown[0] is plans[0]
    cut = [tuple(d > 1 for d in (p.run.plan.mesh.pp, p.run.plan.mesh.cp, p.run.plan.mesh.tp)) for p in shown]
    assert len(set(cut)) == len(cut) < len(plans)
