"""Stragglers by sampling: what waits for whom."""

from __future__ import annotations

import numpy as np
import pytest

from superstep.cost.program.time.simulate import PerUnit, UnitSeconds
from superstep.cost.program.time.stragglers import Jitter, slowest, straggle
from superstep.errors import ConfigError
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step

RUN = resolve(
    RunConfig(
        model=ModelConfig(name="tiny", layers=6),
        data=DataConfig(sequence_tokens=64),
        train=TrainConfig(batch_sequences=8),
        plan=PlanConfig(pp=4, microbatch=1, schedule="1f1b"),
    ),
    4,
)
PROGRAM = compile_step(RUN.plan)
SECONDS = PerUnit(units=(UnitSeconds(forward_s=1.0, backward_s=2.0),) * 8)


def mean(jitter: Jitter, **over: int) -> float:
    return straggle(PROGRAM, SECONDS, jitter, **{"lockstep": 1, "copies": 1, **over}).mean_s


def test_without_jitter_nothing_is_late():
    found = straggle(PROGRAM, SECONDS, Jitter(spread=0.0), lockstep=8, copies=64)
    assert found.mean_s == found.late_s == found.clean_s


def test_a_chip_that_is_slow_for_good_slows_all():
    # Where every chip is slow, all compute takes as much longer.
    assert mean(Jitter(spread=0.0, slow_share=1.0, slow_by=0.1)) == pytest.approx(1.1 * mean(Jitter(spread=0.0)))


def test_more_chips_wait_longer():
    jitter = Jitter(spread=0.05)
    lockstep = [mean(jitter, lockstep=n) for n in (1, 8, 64)]
    copies = [mean(jitter, copies=n) for n in (1, 64, 4096)]
    assert lockstep == sorted(lockstep)
    assert copies == sorted(copies)
    assert lockstep[0] < lockstep[2]
    assert copies[0] < copies[2]


def test_one_slow_chip_in_a_thousand_is_nearly_always_met_among_many():
    jitter = Jitter(spread=0.0, slow_share=0.001, slow_by=0.5)
    few, many = mean(jitter, copies=1), mean(jitter, lockstep=8, copies=512)
    assert many > 1.2 * few


def test_the_largest_of_many_has_its_distribution():
    rng = np.random.default_rng(1)
    drawn = np.array([slowest(float(u), 100) for u in rng.random(4000)])
    direct = rng.standard_normal((4000, 100)).max(axis=1)
    assert drawn.mean() == pytest.approx(direct.mean(), abs=0.03)
    assert drawn.std() == pytest.approx(direct.std(), abs=0.03)


def test_samples_repeat_with_their_seed():
    once, again, other = (straggle(PROGRAM, SECONDS, Jitter(), lockstep=2, copies=2, seed=s) for s in (1, 1, 2))
    assert once == again != other


def test_a_spread_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"slow_share = 1\.5 must be between 0 and 1"):
        Jitter(slow_share=1.5)
