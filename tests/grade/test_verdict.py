"""What a grader's value means, and what never is a reward."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.grade.verdict import Verdict, grader_error, line, ok, verdict_from_json, verdict_of, wrong


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, ok()),
        (False, wrong()),
        (1, ok()),
        (0, wrong()),
        (0.25, ok(0.25)),
        (0.0, wrong()),
        (ok(0.5, "half"), ok(0.5, "half")),
    ],
)
def test_what_a_value_means(value, expected):
    assert verdict_of(value) == expected


class Sly(float):
    """A number that compares as it likes."""

    def __le__(self, other):
        return True

    __ge__ = __gt__ = __le__


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -0.5, 1.0001, 2, -1, 10**400, None, "1.0", [1], {}, Sly(7), object()]
)
def test_no_other_value_is_a_score(value):
    verdict = verdict_of(value)
    assert verdict.kind == "grader_error"
    assert verdict.to_json()["score"] is None
    with pytest.raises(AssertionError):
        _ = verdict.reward


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.text(), st.none()))
def test_every_value_is_a_verdict_and_every_reward_from_0_to_1(value):
    verdict = verdict_of(value)
    assert verdict_from_json(verdict.to_json()) == verdict
    if verdict.is_decided:
        assert 0.0 <= verdict.reward <= 1.0


@pytest.mark.parametrize(
    ("kind", "score"),
    [("ok", 0.0), ("ok", 1.5), ("ok", math.nan), ("wrong", 0.5), ("grader_error", 1.0), ("fine", 1.0)],
)
def test_a_verdict_that_contradicts_itself_is_not_made(kind, score):
    with pytest.raises(AssertionError):
        Verdict(kind, score)


def test_a_word_of_the_candidates_is_short_and_harms_no_terminal():
    assert line("a\x1b[31m\nb" + "x" * 1000).startswith("a [31m b")
    assert len(line("x" * 10_000)) < 500
    assert grader_error("\ud800").why == ""
