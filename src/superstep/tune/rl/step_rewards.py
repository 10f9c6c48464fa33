"""Results of graded groups: the advantages of their answers, and the report of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superstep.engine.engine import StepResult
from superstep.errors import DataError, Fault
from superstep.grade.verdict import Verdict
from superstep.state.manifest import Position
from superstep.tune.advantage import Advantage, ScoredAnswer, TokenShare
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.sampling import TaskGroup

Shares = list[list[TokenShare | None] | None]

MOST_ALIKE = 8
"""Consecutive steps with equal rewards, or with all answers cut, after which the run ends: there is nothing to learn.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStepResult:
    """The report of one step of reinforcement learning.

    Attributes:
        step: finished steps.
        result: of the trainer.
        reward: the mean of all graded answers.
        answers: number of graded answers.
        lost: number of answers without a grade, as their grader failed.
        cut: answers that were cut.
        uniform: groups with equal rewards.
        lag: number of steps by which the sampler's weights were older than the trained ones.
        drawn_tokens: of all answers.
        seconds: since the step before.
        sampling_s: of them, in sampling.
        lr: the learning rate.
        tokens_seen: with a target, since the run began.
    """

    step: int
    result: StepResult
    reward: float
    answers: int
    lost: int
    cut: int
    uniform: int
    lag: int
    drawn_tokens: int
    seconds: float
    sampling_s: float
    lr: float
    tokens_seen: int


def shares_of(
    rl: RlConfig, how: RolloutConfig, groups: Sequence[TaskGroup], verdicts: Sequence[Sequence[Verdict]]
) -> tuple[Shares, float]:
    """Advantages and weights of each answer's tokens, and the divisor of the loss; 0 where nothing counts.

    An answer without a grade is left out, and so is a group with fewer than two grades.
    """
    judge = Advantage(
        estimator=rl.estimator,
        max_tokens=how.max_tokens * how.turns,
        overlong=None if rl.overlong == "none" else rl.overlong,
        drop_uniform=rl.drop_uniform,
    )
    decided = [[n for n, verdict in enumerate(each) if verdict.is_decided] for each in verdicts]
    groups_of_answers = [
        [
            ScoredAnswer(
                reward=each[n].reward,
                tokens=group.answers[n].drawn_tokens,
                is_cut=group.answers[n].rollout.finish == "length",
            )
            for n in known
        ]
        for group, each, known in zip(groups, verdicts, decided, strict=True)
    ]
    advantages = judge.shares([each for each in groups_of_answers if len(each) > 1])
    rest = iter(advantages.groups)
    shares: Shares = []
    for group, known in zip(groups, decided, strict=True):
        given = next(rest) if len(known) > 1 else None
        by_place = dict(zip(known, given or (), strict=given is not None))
        shares.append(None if given is None else [by_place.get(n) for n in range(len(group.answers))])
    return shares, advantages.divisor


def learnt_of(
    groups: Sequence[TaskGroup],
    verdicts: Sequence[Sequence[Verdict]],
    result: StepResult,
    *,
    position: Position,
    lr: float,
    seconds: float,
    sampling_s: float,
) -> RlStepResult:
    """The report of a step, after which training is at ``position``."""
    rewards = [[one.reward for one in each if one.is_decided] for each in verdicts]
    flat = [reward for each in rewards for reward in each]
    answers = [answer for group in groups for answer in group.answers]
    return RlStepResult(
        step=position.step,
        result=result,
        reward=sum(flat) / len(flat),
        answers=len(flat),
        lost=len(answers) - len(flat),
        cut=sum(answer.rollout.finish == "length" for answer in answers),
        uniform=sum(len(set(each)) < 2 for each in rewards),
        lag=max(position.step - 1 - group.version for group in groups),
        drawn_tokens=sum(answer.drawn_tokens for answer in answers),
        seconds=seconds,
        sampling_s=sampling_s,
        lr=lr,
        tokens_seen=position.tokens,
    )


class CutAnswerCount:
    """Counts consecutive steps with all answers cut, and so left out of the loss.

    Args:
        rl: settings of the loss.
        how: settings of sampling.
        tokens: of a row of the batch.
        steps: of the whole run.
    """

    def __init__(self, rl: RlConfig, how: RolloutConfig, tokens: int, steps: int) -> None:
        self._rl = rl
        self._how = how
        self._tokens = tokens
        self._most = min(MOST_ALIKE, steps)
        self._steps = 0

    def see(self, groups: Sequence[TaskGroup]) -> None:
        """Add a step.

        Raises:
            DataError: there is nothing to learn.
        """
        is_cut = all(answer.rollout.finish == "length" for group in groups for answer in group.answers)
        self._steps = self._steps + 1 if is_cut and self._rl.overlong == "mask" else 0
        if self._steps < self._most:
            return
        raise DataError(
            f"all answers of the last {self._steps} steps were cut off (rollout.max_tokens = {self._how.max_tokens}, "
            f"data.sequence_tokens = {self._tokens}), and rl.overlong = 'mask' leaves them out of the loss: nothing "
            "was learnt. Set rollout.max_tokens higher, with a data.sequence_tokens that has room for prompt and "
            "answer; or set rl.overlong to none or penalty."
        )


class EqualRewardCount:
    """Counts consecutive steps with equal rewards."""

    def __init__(self) -> None:
        self._steps = 0
        self._reward = 0.0

    def see(self, step: int, verdicts: Sequence[Sequence[Verdict]]) -> None:
        """Add a step.

        Raises:
            DataError: there is nothing to learn.
            Fault: no answer has a grade.
        """
        rewards = {one.reward for each in verdicts for one in each if one.is_decided}
        if not rewards:
            raise Fault("no answer has a grade: every grader failed.", step=step + 1)
        if len(rewards) > 1 or (self._steps and rewards != {self._reward}):
            self._steps = 0
        if len(rewards) > 1:
            return
        (self._reward,) = rewards
        self._steps += 1
        if self._steps < MOST_ALIKE:
            return
        mend = (
            "the tasks are solved; give harder ones, or stop here."
            if self._reward == 1.0
            else "give easier tasks, look at what grade() says with superstep grade check, or tune with examples first "
            "(superstep tune sft)."
        )
        raise DataError(
            f"all rewards of the last {MOST_ALIKE} steps are {self._reward:g}, and nothing is learnt from answers that "
            f"are all alike: {mend}"
        )
