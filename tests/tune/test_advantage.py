"""Advantages: what a group's rewards come to, by each estimator and each rule for what does not count."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superstep.errors import ConfigError, DataError
from superstep.tune.advantage import Advantage, ScoredAnswer, advantages

REWARDS = st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=16)


@given(REWARDS)
def test_estimators_are_those_of_their_papers(rewards):
    r = torch.tensor(rewards, dtype=torch.float64)
    near = pytest.approx
    assert advantages(rewards, "dr-grpo") == near((r - r.mean()).tolist(), abs=1e-12)
    others = [(r.sum() - one) / (len(r) - 1) for one in r]
    assert advantages(rewards, "rloo") == near([float(a - b) for a, b in zip(r, others, strict=True)], abs=1e-11)
    if min(rewards) < max(rewards):
        assert advantages(rewards, "grpo") == near(((r - r.mean()) / r.std()).tolist(), rel=1e-9, abs=1e-9)


@given(REWARDS, st.randoms())
def test_the_order_of_a_groups_answers_does_not_matter(rewards, randoms: random.Random):
    order = list(range(len(rewards)))
    randoms.shuffle(order)
    for estimator in ("grpo", "rloo", "dr-grpo"):
        found = advantages(rewards, estimator)
        assert advantages([rewards[i] for i in order], estimator) == tuple(found[i] for i in order)
        assert math.fsum(found) == pytest.approx(0, abs=1e-9)


@given(st.floats(-1e3, 1e3), st.integers(2, 20))
def test_equal_rewards_have_no_advantage_whatever_their_mean_is_rounded_to(reward, count):
    for estimator in ("grpo", "rloo", "dr-grpo"):
        assert advantages([reward] * count, estimator) == (0.0,) * count


def group(*rewards, tokens=10, cut=()):
    return [ScoredAnswer(reward=r, tokens=tokens + i, is_cut=i in cut) for i, r in enumerate(rewards)]


def test_weights_and_divisor_make_the_mean_that_a_paper_has():
    groups = [group(1.0, 0.0), group(0.5, 0.0, 0.0)]
    grpo = Advantage(max_tokens=20).shares(groups)
    assert [share.weight for share in grpo.groups[1]] == [1 / 10, 1 / 11, 1 / 12]
    assert grpo.divisor == 5
    assert Advantage(max_tokens=20, estimator="rloo").shares(groups).divisor == 5
    dr = Advantage(max_tokens=20, estimator="dr-grpo").shares(groups)
    assert {share.weight for shares in dr.groups for share in shares} == {1.0}
    assert dr.divisor == 5 * 20


def test_groups_whose_rewards_are_equal_are_dropped_from_the_divisor_too():
    groups = [group(1.0, 1.0), group(1.0, 0.0)]
    kept = Advantage(max_tokens=20).shares(groups)
    assert kept.divisor == 4
    assert [share.advantage for share in kept.groups[0]] == [0.0, 0.0]
    dropped = Advantage(max_tokens=20, drop_uniform=True).shares(groups)
    assert (dropped.groups[0], dropped.divisor) == (None, 2)
    assert dropped.groups[1] == kept.groups[1]
    assert Advantage(max_tokens=20, drop_uniform=True).shares(groups[:1]).divisor == 0


def test_an_answer_that_was_cut_is_masked_and_its_reward_still_counts():
    groups = [group(1.0, 0.0, 0.0, cut=(2,))]
    plain, masked = Advantage(max_tokens=20).shares(groups), Advantage(max_tokens=20, overlong="mask").shares(groups)
    assert [share.weight for share in masked.groups[0]] == [1 / 10, 1 / 11, 0.0]
    assert masked.divisor == 2
    assert [s.advantage for s in masked.groups[0]] == [s.advantage for s in plain.groups[0]]


def test_the_penalty_grows_over_the_last_tokens():
    """Yu 2025, eq. 13, with L_max = 20 and L_cache = 8."""
    rule = Advantage(max_tokens=20, overlong="penalty", overlong_tokens=8, estimator="dr-grpo")
    lengths = [1, 12, 16, 20]
    penalties = [0.0, 0.0, (20 - 8 - 16) / 8, -1.0]
    shares = rule.shares([[ScoredAnswer(reward=1.0, tokens=n) for n in lengths]]).groups[0]
    mean = sum(penalties) / 4
    assert [share.advantage for share in shares] == pytest.approx([p - mean for p in penalties])


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Advantage(max_tokens=9).shares([group(1.0)]), ConfigError, "group 0 has 1 answer"),
        (
            lambda: Advantage(max_tokens=9).shares([group(1.0, math.nan)]),
            DataError,
            "answer 1 of group 0 has the reward",
        ),
        (lambda: Advantage(max_tokens=9).shares([group(1.0, 0.0, tokens=0)]), DataError, "and 0 tokens"),
        (lambda: Advantage(max_tokens=0), ConfigError, "max_tokens = 0"),
        (lambda: Advantage(max_tokens=9, overlong="penalty", overlong_tokens=10), ConfigError, "overlong_tokens = 10"),
    ],
)
def test_what_cannot_be_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()
