"""Published facts: tables and formulas of the papers, from ours."""

from __future__ import annotations

import pytest

from bench.facts import Fact, bubble, facts, over_ideal

FEW = 2000
"""Passes of the largest program here; ``python -m bench.facts`` runs them all."""

MISSED = {"zb5-ZB-2p-1.5B-24"}
"""Its bubble is ten times that of the same model with 8 microbatches more: the paper's search stopped short there."""


@pytest.fixture(scope="module")
def found():
    return {fact.name: fact for fact in facts(most_passes=FEW)}


def test_every_fact_is_held_but_the_one_that_is_known(found):
    assert {name for name, fact in found.items() if not fact.is_held} == MISSED


@pytest.mark.parametrize(
    ("start", "count"), [("zero-", 45), ("act-", 22), ("actmem-", 20), ("mem1-", 12), ("bubble-", 22)]
)
def test_every_kind_of_fact_is_there(found, start, count):
    assert sum(name.startswith(start) for name in found) >= count


def test_the_zero_bubble_papers_rates_are_ours_within_half_a_point(found):
    rates = [fact for name, fact in found.items() if name.startswith("zb5-") and name not in MISSED]
    assert len(rates) >= 35
    assert max(abs(fact.ours - fact.published) for fact in rates) < 0.006


def test_a_fact_that_is_off_is_not_held():
    assert not Fact("", 1.0, 1.02, 0.01).is_held


def test_more_microbatches_leave_less_bubble():
    assert over_ideal(bubble("1f1b", 4, 8)) == pytest.approx(3 / 8)
    assert bubble("1f1b", 4, 8) > bubble("1f1b", 4, 16) > bubble("interleaved", 4, 16, chunks=2)
