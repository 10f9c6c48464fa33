"""Advantages: from the rewards of a group of answers to the weights of their tokens.

A group is several answers to one prompt. Their rewards count only relative to each other:

    estimator   A of answer i                          its tokens' weight   divisor of the loss
    grpo        (r_i - mean) / std                     1 / |y_i|            answers               Shao 2024, eq. 3
    rloo        r_i - mean of the others               1                    answers               Ahmadian 2024, eq. 8
    dr-grpo     r_i - mean                             1                    answers · max_tokens  Liu 2025, sec. 3.1

``std`` is the sample standard deviation, with divisor n - 1. Weights and divisor depend only on numbers that are known
before the step, so the loss does not depend on the layout. Sums of plain floats are correctly rounded, so the bits are
the same on any machine, and for any order of the answers in a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from superstep.errors import ConfigError, DataError

Estimator = Literal["grpo", "rloo", "dr-grpo"]
Overlong = Literal["mask", "penalty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One graded answer.

    Attributes:
        reward: its grade.
        tokens: number of the policy's tokens, above zero.
        is_cut: whether the length limit ended it.
    """

    reward: float
    tokens: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """Values of an answer's tokens in the streams ``advantages`` and ``weights``."""

    advantage: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages of a batch of groups.

    Attributes:
        groups: the share of each answer, by group; None for a group that is left out.
        divisor: the divisor of the step's loss; 0 if no answer counts, and then no step is taken.
    """

    groups: tuple[tuple[TokenShare, ...] | None, ...]
    divisor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """Settings of advantages.

    Attributes:
        estimator: see above.
        max_tokens: limit of an answer's length.
        overlong: treatment of cut answers: ``mask`` leaves their tokens out of the loss, though their rewards count for
            the others; ``penalty`` reduces the reward of every answer near the limit (Yu 2025, eq. 13); None does
            nothing.
        overlong_tokens: number of last tokens over which the penalty grows from 0 to 1.
        drop_uniform: leave out a group with equal rewards, from the divisor too (Yu 2025, sec. 3.2). Otherwise its
            answers count, with an advantage of zero.

    Raises:
        ConfigError: a number is out of range.
    """

    estimator: Estimator = "grpo"
    max_tokens: int
    overlong: Overlong | None = None
    overlong_tokens: int | None = None
    drop_uniform: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens = {self.max_tokens} must be at least 1: an answer has at least one token.")
        if self.overlong == "penalty" and not 1 <= self._margin_tokens <= self.max_tokens:
            raise ConfigError(
                f"overlong_tokens = {self._margin_tokens} must be in 1 to {self.max_tokens} (max_tokens): the penalty "
                "grows over so many last tokens."
            )

    @property
    def _margin_tokens(self) -> int:
        return max(self.max_tokens // 5, 1) if self.overlong_tokens is None else self.overlong_tokens

    def shares(self, groups: Sequence[Sequence[ScoredAnswer]]) -> Advantages:
        """The advantage and weight of each answer's tokens.

        Raises:
            ConfigError: a group has only one answer, so it cannot be compared with others.
            DataError: a reward is NaN, or an answer has no token.
        """
        of_groups = [self._group(number, group) for number, group in enumerate(groups)]
        # Sums of whole numbers are exact in float, in any order.
        counted = sum(share.weight > 0 for shares in of_groups if shares is not None for share in shares)
        each = self.max_tokens if self.estimator == "dr-grpo" else 1
        return Advantages(groups=tuple(of_groups), divisor=float(counted * each))

    def _group(self, number: int, group: Sequence[ScoredAnswer]) -> tuple[TokenShare, ...] | None:
        if len(group) < 2:
            raise ConfigError(
                f"group {number} has {len(group)} answer: an advantage needs other answers; set rl.group to at least 2."
            )
        for place, answer in enumerate(group):
            if not math.isfinite(answer.reward) or answer.tokens < 1:
                raise DataError(
                    f"answer {place} of group {number} has the reward {answer.reward} and {answer.tokens} tokens; a "
                    "reward is a finite number, and an answer has a token: leave out answers without a grade."
                )
        rewards = [answer.reward - self._penalty(answer) for answer in group]
        if self.drop_uniform and min(rewards) == max(rewards):
            return None
        gains = advantages(rewards, self.estimator)
        return tuple(
            TokenShare(advantage=gain, weight=self._weight(answer)) for gain, answer in zip(gains, group, strict=True)
        )

    def _weight(self, answer: ScoredAnswer) -> float:
        if self.overlong == "mask" and answer.is_cut:
            return 0.0
        return 1.0 / answer.tokens if self.estimator == "grpo" else 1.0

    def _penalty(self, answer: ScoredAnswer) -> float:
        """The reduction of the reward: 0 until the last tokens, 1 at ``max_tokens``."""
        if self.overlong != "penalty":
            return 0.0
        over = answer.tokens - (self.max_tokens - self._margin_tokens)
        return min(max(over / self._margin_tokens, 0.0), 1.0)


def advantages(rewards: Sequence[float], estimator: Estimator) -> tuple[float, ...]:
    """Advantages of a group's answers; all zero if all rewards are equal."""
    count = len(rewards)
    if min(rewards) == max(rewards):  # exactly zero, though the rounded mean may differ from them
        return (0.0,) * count
    total = math.fsum(rewards)
    mean = total / count
    match estimator:
        case "dr-grpo":
            return tuple(reward - mean for reward in rewards)
        case "rloo":
            return tuple(reward - math.fsum((total, -reward)) / (count - 1) for reward in rewards)
        case "grpo":
            std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
            return tuple((reward - mean) / std for reward in rewards)
