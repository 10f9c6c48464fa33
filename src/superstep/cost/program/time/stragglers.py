"""Stragglers: how much longer a step takes when chips differ, by sampling.

Chips in lockstep (tensor and context parallelism) wait for the slowest of them at every operation; copies of a pipeline
(data parallelism) wait for the slowest at the end of the step. The ranks of a group are alike, so the slowest of n is
drawn at once: for uniform u, u^(1/n) has the distribution of the largest of n. A hundred thousand chips cost no more
than one pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from superstep.cost.program.time.simulate import Durations, simulate
from superstep.errors import ConfigError
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """How chips differ.

    Attributes:
        spread: the standard deviation of the logarithm of an operation's seconds.
        slow_share: permanently slow chips; MegaScale found some hosts 10% slower (Jiang 2024, sec. 6.3).
        slow_by: 0.1 takes a tenth longer.
    """

    spread: float = 0.02
    slow_share: float = 0.0
    slow_by: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, most in (("spread", 1.0), ("slow_share", 1.0), ("slow_by", 10.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} = {getattr(self, name)} must be between 0 and {most:g}.")


@dataclass(frozen=True, slots=True)
class StragglerResult:
    """A step's seconds over samples: ``clean_s`` without jitter, ``late_s`` is exceeded by one step in twenty."""

    clean_s: float
    mean_s: float
    late_s: float


def straggle(
    program: Program,
    durations: Durations,
    jitter: Jitter,
    *,
    lockstep: int,
    copies: int,
    samples: int = 16,
    seed: int = 0,
) -> StragglerResult:
    """The step of ``copies`` pipelines with ``lockstep`` chips for each rank."""
    clean_s = simulate(program, durations).step_s
    rng = np.random.default_rng(seed)
    even = [1.0] * program.pp
    noisy = np.array([_pipeline_s(program, durations, even, jitter.spread, lockstep, rng) for _ in range(samples)])
    slow = np.array(
        [
            _pipeline_s(program, durations, _slow_ranks(program, jitter, lockstep, copies, rng), 0.0, 1, rng)
            for _ in noisy
        ]
    )
    # Among copies the slowest decides: its noise is the largest of as many draws.
    late = np.array([slowest(float(u), copies) for u in rng.random(samples)])
    steps = slow * np.maximum(noisy.mean() + noisy.std() * late, clean_s) / clean_s
    return StragglerResult(clean_s, float(steps.mean()), float(np.quantile(steps, 0.95)))


def _slow_ranks(
    program: Program, jitter: Jitter, lockstep: int, copies: int, rng: np.random.Generator
) -> Sequence[float]:
    """How many times longer each rank takes in the copy with the most slow ranks."""
    slow_rank = 1 - (1 - jitter.slow_share) ** lockstep
    slow = max((rng.random((copies, program.pp)) < slow_rank).tolist(), key=sum)
    return [1 + jitter.slow_by * is_slow for is_slow in slow]


def slowest(u: float, count: int) -> float:
    """The largest of ``count`` standard normal numbers, from one uniform number."""
    return NORMAL.inv_cdf(min(max(u ** (1 / count), 1e-12), 1 - 1e-12))


def _pipeline_s(
    program: Program,
    durations: Durations,
    factors: Sequence[float],
    spread: float,
    lockstep: int,
    rng: np.random.Generator,
) -> float:
    """The step of one copy, each operation at the pace of its slowest chip."""

    def noisy(instruction: Instruction, rank: int, /) -> float:
        seconds = durations(instruction, rank)
        match instruction:
            case (
                ins.Forward()
                | ins.Backward()
                | ins.BackwardInput()
                | ins.BackwardWeight()
                | ins.Recompute()
                | ins.Step()
            ):
                noise = float(np.exp(spread * slowest(rng.random(), lockstep))) if spread else 1.0
                return float(seconds * factors[rank] * noise)
            case _:
                return seconds

    step_s: float = simulate(program, noisy).step_s
    return step_s
