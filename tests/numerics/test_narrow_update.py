"""Stochastic rounding to bf16: unbiased, by given words, and of finite numbers alone."""

from __future__ import annotations

import pytest
import torch

from superstep.numerics.narrow.narrow_update import NarrowPart, round_stochastically, update_narrow
from superstep.numerics.update_rules import RULES, OptimizerSettings, UpdateNumbers

SETTINGS = OptimizerSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
COUNT = 3000


def words(count=COUNT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


def test_the_mean_of_what_is_rounded_is_what_was_given():
    x = torch.tensor([1.0 + 2**-7 * 0.3, -(1.0 + 2**-7 * 0.3), 3e-39, 1e30])
    many = torch.stack([round_stochastically(x, words(4, seed)).double() for seed in range(4000)])
    steps = torch.tensor([2**-7, 2**-7, 2**-133, 1e30 * 2**-7], dtype=torch.float64)
    assert ((many.mean(0) - x.double()).abs() < 0.03 * steps).all()
    assert (many.std(0) > 0).tolist() == [True, True, True, True]


def test_a_number_of_bf16_stays_itself():
    x = torch.randn(COUNT).bfloat16()
    assert torch.equal(round_stochastically(x.float(), words()), x)


def test_what_is_not_finite_stays_so():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(1000)
    out = round_stochastically(x, words())
    torch.testing.assert_close(out.float(), x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", RULES)
def test_an_update_in_bf16_keeps_changes_that_are_less_than_half_a_step(name):
    """A weight of 1 moves by 2^-12 a step of bf16's 2^-8: rounded to nearest it would never move."""
    kinds = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ()}[name]
    moments = {kind: torch.zeros(COUNT, dtype=torch.bfloat16) for kind in kinds}
    calls = iter(range(10**6))
    part = NarrowPart(
        torch.ones(COUNT, dtype=torch.bfloat16),
        torch.ones(COUNT),
        moments,
        lambda kind, number, low, high: words(COUNT, next(calls))[low:high],
    )
    for number in range(1, 41):
        now = UpdateNumbers(lr=2**-12, decay=0.0, scale=1.0, number=number)
        update_narrow(part, RULES[name], SETTINGS, now)
    assert part.param.float().mean().item() == pytest.approx(1 - 40 * 2**-12, abs=3e-4)
