"""Update rules: what their papers say, the same bits however a tensor is cut, and kernels that do the same."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from superstep.numerics.update_rules import RULES, OptimizerSettings, UpdateNumbers
from superstep.plan.optimizers import MOMENTS

SETTINGS = OptimizerSettings(beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
STEPS = 4


def inputs(count=1000):
    """A parameter, and a gradient for each step."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(count, generator=generator) for _ in range(STEPS)]
    return torch.randn(count, generator=generator), grads


def numbers(step):
    return UpdateNumbers(lr=1e-2 / (1 + step), decay=0.1, scale=1.5, number=step + 1)


def updated(name, *, parts=1, fused=False):
    """The parameter and its moments after some steps."""
    param, grads = inputs()
    moments = [torch.zeros_like(param) for _ in MOMENTS[name]]
    for step, grad in enumerate(grads):
        if fused:
            RULES[name].fused([param], [grad], [[moment] for moment in moments], SETTINGS, numbers(step))
            continue
        for part, own, *rest in zip(*(each.tensor_split(parts) for each in (param, grad, *moments)), strict=True):
            RULES[name].update(part, own, rest, SETTINGS, numbers(step))
    return [param, *moments]


def adamw(w, grads):
    m = v = 0.0
    for step, g in enumerate(grads):
        now, t = numbers(step), step + 1
        g /= now.scale
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        w -= now.lr * 0.1 * w + now.lr * (m / (1 - 0.9**t)) / (sqrt(v / (1 - 0.98**t)) + 1e-8)
    return [w, m, v]


def lion(w, grads):
    m = 0.0
    for step, g in enumerate(grads):
        now = numbers(step)
        g /= now.scale
        c = 0.9 * m + 0.1 * g
        w -= now.lr * ((c > 0) - (c < 0) + 0.1 * w)
        m = 0.98 * m + 0.02 * g
    return [w, m]


def sgd(w, grads):
    for step, g in enumerate(grads):
        now = numbers(step)
        w -= now.lr * (g / now.scale + 0.1 * w)
    return [w]


TEXTBOOK = {"adamw": adamw, "lion": lion, "sgd": sgd}


def test_each_optimizer_has_a_rule():
    assert set(RULES) == set(MOMENTS) == set(TEXTBOOK)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_does_what_its_paper_says(name):
    param, grads = inputs()
    each = zip(param.tolist(), *(grad.tolist() for grad in grads), strict=True)
    expected = torch.tensor([TEXTBOOK[name](w, list(gs)) for w, *gs in each], dtype=torch.float64)
    for found, column in zip(updated(name), expected.unbind(1), strict=True):
        torch.testing.assert_close(found.double(), column, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_the_same_bits_however_a_tensor_is_cut(name):
    whole = updated(name)
    for parts in (3, 7):
        assert all(torch.equal(one, other) for one, other in zip(whole, updated(name, parts=parts), strict=True))


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.fused is not None])
def test_its_kernel_does_the_same(name):
    for one, other in zip(updated(name), updated(name, fused=True), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


def test_where_the_gradient_is_zero_lion_changes_nothing_but_by_decay():
    param, moment = torch.ones(3), torch.zeros(3)
    RULES["lion"].update(
        param, torch.zeros(3), [moment], SETTINGS, UpdateNumbers(lr=1.0, decay=0.0, scale=1.0, number=1)
    )
    assert torch.equal(param, torch.ones(3))
    assert torch.equal(moment, torch.zeros(3))
