"""Training on graded groups, on one training rank: a step, its report, and its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from superstep.engine.engine import StepResult
from superstep.engine.flat.snapshots import FlushResult
from superstep.errors import DiskFault, Fault, StateError
from superstep.grade.verdict import Verdict
from superstep.numerics.objective import Streams
from superstep.numerics.policy import PolicyLoss
from superstep.numerics.sequence_losses import sequence_policy
from superstep.observe.events import Event
from superstep.train.policy.spike_detector import SkippedStep
from superstep.train.rollback import check_state, go_back, tell_refused
from superstep.train.saving import report_flushed, save
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.pack_rollouts import PackedRollouts, lessons_of, require_same_bits
from superstep.tune.rl.policy_trainer import LogProbDiffers, PolicyTrainer
from superstep.tune.rl.sampling import TaskGroup
from superstep.tune.rl.step_rewards import CutAnswerCount, EqualRewardCount, RlStepResult, learnt_of, shares_of


class RunEnded(Exception):
    """The run ended before its last step, and the state is saved."""


class RunWentBack(Fault):
    """The run goes back to an earlier state, which the trainer has, and goes on with what is left from there."""

    skip: str = ""
    """What is left out from there on, in the form of ``train.skip``."""

    to_step: int = 0
    """The step to resume after."""


Tell = Callable[[RlStepResult], None]
TellSave = Callable[[Event], None]


def tell_nobody(event: Event) -> None:
    """A ``TellSave`` that does nothing."""


class RlTraining:
    """One rank.

    Args:
        rl: settings of the loss.
        how: settings of sampling.
        steps: of the whole run.
        trainer: this rank's trainer.
        tell: receives each step.
        tell_save: receives each checkpoint, and its problems.
    """

    def __init__(
        self,
        rl: RlConfig,
        how: RolloutConfig,
        steps: int,
        trainer: PolicyTrainer,
        tell: Tell,
        tell_save: TellSave = tell_nobody,
    ) -> None:
        self._rl = rl
        self._how = how
        self._steps = steps
        self._trainer = trainer
        self._tell = tell
        self._tell_save = tell_save
        self._alike = EqualRewardCount()
        self._all_cut = CutAnswerCount(rl, how, trainer.run.config.data.sequence_tokens, steps)
        self._since_s = time.perf_counter()

    def train(
        self, step: int, groups: Sequence[TaskGroup], verdicts: Sequence[Sequence[Verdict]], *, sampling_s: float
    ) -> None:
        """One step.

        Args:
            step: finished steps.
            groups: of the step.
            verdicts: of each group's answers.
            sampling_s: seconds of sampling, or of waiting for it, since the step before.

        Raises:
            Stopped: a stop was requested, and the step is saved.
            DataError: there has been nothing to learn for too many steps.
        """
        self._all_cut.see(groups)
        self._alike.see(step, verdicts)
        shares, divisor = shares_of(self._rl, self._how, groups, verdicts)
        config, rl = self._trainer.run.config, self._rl
        lessons = lessons_of(
            groups,
            shares,
            divisor=divisor or 1.0,
            multiple=self._trainer.multiple,
            tokens=config.data.sequence_tokens,
            is_masked=config.data.is_masked,
            keeps_all=config.numerics.exact or bool(rl.kl_coef) or rl.ratio == "sequence",
        )
        result = self._take(lessons, version=min(group.version for group in groups), step=step)
        now_s = time.perf_counter()
        seconds, self._since_s = now_s - self._since_s, now_s
        lr = self._trainer.learning_rate(step)
        learnt = learnt_of(
            groups, verdicts, result, position=self._trainer.position, lr=lr, seconds=seconds, sampling_s=sampling_s
        )
        self._tell(learnt)
        self._trainer.copies.tell(self._report_flushed)
        if result.is_stop_requested and step + 1 < self._steps:
            self.save(is_last=True)
            raise RunEnded
        if result.is_copy_refused:
            tell_refused(self._trainer, step + 1, self._tell_save)
            save(self._trainer, self._trainer.position, self._tell_save, is_last=False)

    def _take(self, lessons: PackedRollouts, *, version: int, step: int) -> StepResult:
        """Take a step, and check its update and the state after it.

        Raises:
            WentBack: to an earlier state, after a rejected step.
        """
        trainer, policy, before = self._trainer, self._trainer.policy, self._trainer.position
        while True:
            trainer.copies.begin(before, self._report_flushed)
            result = self._step(lessons, version=version, step=step)
            skipped = policy.make_skipped(result, step + 1) if result.refused else self._check(result, step + 1)
            if skipped is None:
                policy.spikes.took(step + 1, result.loss, result.grad_norm)
                return result
            position, skip = go_back(trainer, before, skipped, self._tell_save)
            if position.step != step or skip:
                trainer.position = position
                back = RunWentBack(f"{skipped.why}; the run goes back to step {position.step}", step=step + 1)
                back.to_step, back.skip = position.step, skip
                raise back

    def _check(self, result: StepResult, step: int) -> SkippedStep | None:
        is_saved = result.is_stop_requested or result.is_copy_refused or self._trainer.is_saved(step)
        loss, norm = result.loss, result.grad_norm
        return check_state(self._trainer, step, self._tell_save, is_saved=is_saved, loss=loss, grad_norm=norm)

    def _report_flushed(self, flushed: FlushResult, *, is_over: bool = False) -> None:
        report_flushed(self._trainer, self._tell_save, flushed, is_over=is_over)

    def save(self, *, is_last: bool = False) -> None:
        """Write a checkpoint; if the disk fails, the next one may succeed, unless the run ends with this one.

        Raises:
            Fault: the run directory was moved or removed; the state is saved at its new path, or beside.
        """
        trainer, position = self._trainer, self._trainer.position
        is_last = is_last or position.step == self._steps or trainer.follow_folder() is not None
        if is_last:
            trainer.copies.drain()
            tell_refused(trainer, position.step, self._tell_save)
            trainer.copies.tell(partial(self._report_flushed, is_over=True))
        elif trainer.copies.want(position):
            return
        save(trainer, position, self._tell_save, is_last=is_last)

    def publish(self, version: int, root: Path) -> Path:
        """Write the weights of this version as a snapshot. Every rank calls this together.

        Raises:
            Fault: it cannot be written; or the run directory was moved or removed, and the state is saved at its new
                path, or beside.
            StateError: the written files are gone.
        """
        try:
            return self._trainer.publish_version(version, root)
        except (DiskFault, StateError):
            self.require_folder()
            raise

    def require_folder(self) -> None:
        """Check that the run directory was not moved. Every rank calls this together.

        Raises:
            Fault: it was moved or removed; the state is saved at its new path, or beside.
        """
        if self._trainer.follow_folder() is not None:
            self.save()

    def _step(self, lessons: PackedRollouts, *, version: int, step: int) -> StepResult:
        batch, streams = lessons.batch, dict(lessons.batch.streams)
        is_exact, is_fresh = self._trainer.run.plan.grain is not None, version == step
        policy = policy_loss(self._rl, is_exact=is_exact, is_fresh=is_fresh)
        if self._rl.kl_coef:
            streams["reference"] = self._trainer.reference(batch)
        is_whole = self._rl.ratio == "sequence"
        # In exact mode the sampler's equal the trainer's. Otherwise the trainer's own, while it still has these
        # weights.
        if not policy.is_fresh:
            streams["old"] = streams["sampled"]
        if is_whole:
            logprobs = self._trainer.logprobs_of(batch)
            if is_exact and is_fresh:
                require_same_bits(lessons, logprobs, version)
            return self._step_of_answers(lessons, policy, logprobs, streams)
        try:
            return self._trainer.step(replace(batch, streams=streams), policy, is_checked=is_exact and is_fresh)
        except LogProbDiffers:
            require_same_bits(lessons, self._trainer.logprobs_of(batch), version)
            raise AssertionError("a difference was seen in the step, and none behind it") from None

    def _step_of_answers(
        self, lessons: PackedRollouts, policy: PolicyLoss, logprobs_BS: Tensor, streams: Streams
    ) -> StepResult:
        """A step with a loss of whole answers: first their weights, then a weighted step."""
        answer_BS, gains = lessons.answers()
        if not len(gains):
            return self._trainer.step(replace(lessons.batch, streams={"weights": torch.zeros_like(logprobs_BS)}))
        weighed = sequence_policy(policy, logprobs_BS, streams, answer_BS, gains)
        batch = replace(lessons.batch, streams={"weights": weighed.weights}, divisor=float(len(gains)))
        return self._trainer.step(batch, weighed=weighed)


def policy_loss(rl: RlConfig, *, is_exact: bool, is_fresh: bool) -> PolicyLoss:
    """The loss of a recipe. ``is_fresh``: whether the answers were sampled with the weights that are trained."""
    return PolicyLoss(
        surrogate=rl.surrogate,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        correction=rl.correction,
        watches_sampler=not is_exact,
        kl_coef=rl.kl_coef,
        is_fresh=is_fresh and not is_exact,
    )
