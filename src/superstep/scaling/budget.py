"""The best model for a budget of devices: a law of the loss joined with the training speed of each model size.

    C(N) = device-seconds · throughput(N)        D(N) = C(N) / (6·N)        N* = argmin of L(N, D(N))

With a constant throughput this is eq. 4 of Hoffmann 2022. A throughput that rises with N (small models leave a device
idle) makes the best model larger, one that falls (more communication, no plan that fits) makes it smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from superstep.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN, Frontier, Law, PowerFrontier
from superstep.scaling.summary import Fit, FittedNumber, Study, estimate

FRONTIERS = ("hoffmann", "kaplan", "isoflop", "envelope")
Throughput = Callable[[float], float]
"""Sustained FLOP/s of one device, by C = 6·N·D, for a model of N parameters; 0 where none can be trained."""

SIZES_A_LOOK = 15
"""Sizes tried in one round; the next round is around the best of them."""
WIDEST_LOG = 1.5 * math.log(10)
FINEST_LOG = 1e-3
MOST_LOOKS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BestUse:
    """The size, its tokens, their FLOPs, and the final loss where the fit gives one."""

    params: float
    tokens: float
    flops: float
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChoice:
    """One fit's best use of a budget of FLOPs."""

    params: FittedNumber
    tokens: FittedNumber
    loss: FittedNumber | None


def choices(summary: Study, flops: float) -> dict[str, BudgetChoice]:
    """Each fit's best use of the same budget, by the fit's name."""
    fits: dict[str, Fit[Frontier] | None] = {name: getattr(summary, name) for name in FRONTIERS}
    return {name: _choice(fit, flops) for name, fit in fits.items() if fit is not None}


def _choice(fit: Fit[Frontier], flops: float) -> BudgetChoice:
    return BudgetChoice(
        params=estimate(fit, lambda law: law.optimum(flops).params),
        tokens=estimate(fit, lambda law: law.optimum(flops).tokens),
        loss=None if isinstance(fit.law, PowerFrontier) else estimate(fit, lambda law: _least_loss(law, flops)),
    )


def _least_loss(law: Frontier, flops: float) -> float:
    assert not isinstance(law, PowerFrontier), "resampled fits are of their fit's kind"
    best = law.optimum(flops)
    return law.loss(best.params, best.tokens)


def best_of_flops(law: Frontier, flops: float) -> BestUse:
    """The best use of a budget of FLOPs, in closed form."""
    best = law.optimum(flops)
    loss = None if isinstance(law, PowerFrontier) else law.loss(best.params, best.tokens)
    return BestUse(params=best.params, tokens=best.tokens, flops=flops, loss=loss)


def best_for(law: Frontier, device_s: float, throughput: Throughput) -> BestUse | None:
    """The size with the lowest final loss after ``device_s`` device-seconds; None where no size near it can be trained.

    ``throughput`` is called about 60 times, and may have steps; the size is found to a thousandth. A frontier, which
    has no loss, gives the size that is best for the FLOPs of its training.
    """
    guess = _guess(law, device_s, throughput)
    if isinstance(law, PowerFrontier):
        flops = device_s * throughput(guess)
        return best_of_flops(law, flops) if flops > 0 else None
    middle, half = math.log(guess), WIDEST_LOG
    best, least = None, math.inf
    for _ in range(MOST_LOOKS):
        sizes = np.exp(np.linspace(middle - half, middle + half, SIZES_A_LOOK)).tolist()
        tried = [_best_of(law, device_s, throughput, params) for params in sizes]
        losses = [math.inf if each.loss is None else each.loss for each in tried]
        place = losses.index(min(losses))
        if losses[place] == math.inf:
            break
        if losses[place] <= least:
            best, least = tried[place], losses[place]
        middle = math.log(sizes[place])
        if 0 < place < SIZES_A_LOOK - 1:
            half *= 2 / (SIZES_A_LOOK - 1)
        if half < FINEST_LOG:
            break
    return best


def _guess(law: Frontier, device_s: float, throughput: Throughput) -> float:
    """The size of eq. 4 for the throughput at that size."""
    params = 1e9
    for _ in range(3):
        flops_per_s = throughput(params)
        if flops_per_s <= 0:
            break
        params = law.optimum(device_s * flops_per_s).params
    return params


def _best_of(law: Law, device_s: float, throughput: Throughput, params: float) -> BestUse:
    flops = device_s * throughput(params)
    tokens = flops / (FLOPS_PER_PARAMETER_AND_TOKEN * params)
    return BestUse(params=params, tokens=tokens, flops=flops, loss=law.loss(params, tokens) if tokens > 0 else None)
