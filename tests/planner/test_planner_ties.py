"""Of plans that no formula tells apart the simplest is taken."""

from __future__ import annotations

from planning import problem_of, side_of
from superstep.planner.neighbours import improved, simplicity_of
from superstep.planner.search import search
from superstep.planner.ties import TIE, first_of, simplicity, tied
from superstep.planner.verify import verified

PLAIN, SPLIT, AGAIN = (simplicity(*each) for each in (((1, 1), 0, 0.9), ((2, 4), 0, 0.3), ((1, 1), 2, 0.3)))


def test_the_simplest_of_those_tied_is_taken_and_of_equals_the_faster():
    seconds = [1.0, 1.0 + TIE / 2, 1.0 + TIE * 1.1]
    assert tied(seconds) == [0, 1]
    assert first_of(seconds, [SPLIT, PLAIN, PLAIN]) == 1
    assert first_of(seconds, [SPLIT, SPLIT, PLAIN]) == 0
    # Fewer axes before less recomputation, that before memory.
    assert first_of([1.0, 1.0, 1.0], [AGAIN, SPLIT, PLAIN]) == 2
    assert first_of([1.0, 1.0], [AGAIN, SPLIT]) == 0
    assert first_of([1.0, 1.01], [simplicity((1,), 0, 0.80), simplicity((1,), 0, 0.79)]) == 0


def test_the_planner_takes_the_simplest_of_the_fastest():
    side = side_of(problem_of("llama3.2-1b", chips=16, batch=64, sequence=2048))
    plans = sorted((verified(each) for each in search([side], keep=6).best), key=lambda plan: plan.step_s)
    first, beside = improved(plans[0], plans)
    near = [plans[0], *plans, *(each.plan for each in beside)]
    least = min(each.step_s for each in near)
    assert first.step_s <= least * (1 + TIE)
    assert simplicity_of(first) <= min(simplicity_of(each) for each in near if each.step_s <= least * (1 + TIE))
    assert all(each.slower > -TIE for each in beside)
