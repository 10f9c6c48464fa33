"""iterate: the program of a run of reinforcement learning, executed by ranks that sample and train in turn.

    ranks     publish ─ swap ─ take ─ sample g0 g1 ... ─ swap ─ train ─ save ─ ...
    grader                              └ g0 ┘ └ g1 ┘         (rank 0's, beside the others)

Each rank goes through the same lane, one ``case`` for each instruction. What is sampled and graded goes on record as
soon as it is known, and is told to all ranks; everything else follows from the record, the weights and the program.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from superstep.errors import ConfigError, Fault
from superstep.grade.environment import Environment
from superstep.grade.task import Rollout
from superstep.grade.verdict import Verdict
from superstep.numerics.objective import Streams
from superstep.numerics.policy import PolicyLoss
from superstep.numerics.sequence_policy import sequence_policy
from superstep.runtime.engine import StepResult
from superstep.runtime.launch import gather
from superstep.train.schedule import rate
from superstep.tune.program.instructions import (
    Asked,
    Grade,
    Iterations,
    Publish,
    Retire,
    Sample,
    Save,
    Swap,
    Take,
    Train,
)
from superstep.tune.rl.batch import Lessons, lessons_of, require_same_bits
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.judge import Alike, Learnt, learnt_of, shares_of
from superstep.tune.rl.learner import Differs, Learner
from superstep.tune.rl.record import Record
from superstep.tune.rl.sampling import Group
from superstep.tune.rl.seat import Seat


class Stopped(Exception):
    """The run has come to an end before its last step, and what was done is saved."""


class Graders(Protocol):
    """Who grades: ``grade.pool.Pool``."""

    def submit(self, index: int, seed: int, rollout: Rollout) -> Future[Verdict]:
        """The verdict, once it is there."""


Tell = Callable[[Learnt], None]
Saved = Callable[[Path, float], None]


class Iterate:
    """One rank.

    Args:
        rl: what is learnt.
        how: answers are sampled.
        seed: of the tasks.
        learner: this rank's part in training.
        seat: its part in sampling.
        environment: of the tasks.
        record: what is known; rank 0 keeps it.
        graders: rank 0's; None on the others.
        tell: told of each step.
        saved: told of each checkpoint, and how long it took to write.
    """

    def __init__(  # noqa: PLR0913
        self,
        rl: RlConfig,
        how: RolloutConfig,
        seed: int,
        learner: Learner,
        seat: Seat,
        environment: Environment,
        record: Record,
        graders: Graders | None,
        tell: Tell,
        saved: Saved = lambda place, seconds: None,
    ) -> None:
        self._rl = rl
        self._how = how
        self._seed = seed
        self._learner = learner
        self._seat = seat
        self._environment = environment
        self._record = record
        self._graders = graders
        self._tell = tell
        self._saved = saved
        self._grading: dict[int, list[Future[Verdict]]] = {}
        self._alike = Alike()
        self._since_s = time.perf_counter()
        self._sampling_s = 0.0

    def run(self, program: Iterations) -> None:
        """Everything that a program lists."""
        asked = program.asked
        for i in program.lane("grader"):
            assert isinstance(i, Grade)
            self._submit(i.group)
        lane = program.lane("ranks")
        taken: Path | None = None
        at = 0
        while at < len(lane):
            match lane[at]:
                case Sample(_, version):
                    assert taken is not None, "a version was taken"
                    batch = _run_of_samples(lane[at:])
                    self._sample([i.group for i in batch], version, taken)
                    at += len(batch)
                    continue
                case Take(version):
                    taken = self._record.published[version]
                case Publish(version):
                    self._publish(version)
                case Retire(version):
                    self._retire(version)
                case Swap(to):
                    # The sampler takes its memory with a version, and gives it back behind the last of its groups.
                    self._learner.sleep() if to == "sample" else self._learner.wake()
                case Train(step):
                    if self._train(asked, step) and step + 1 < asked.steps:
                        self._save()
                        raise Stopped
                case Save():
                    self._save()
                case Grade():
                    raise AssertionError("grades have a lane of their own")
            at += 1

    def _sample(self, groups: Sequence[int], version: int, folder: Path) -> None:
        begin_s = time.perf_counter()
        tasks = [(group, self._environment.task(group, self._seed)) for group in groups]
        mine = []
        for group in self._seat.sample(folder, version, tasks):
            mine.append(group)
            if self._learner.peers.size == 1:
                self._keep(group)
        if self._learner.peers.size > 1:
            for group in sorted((g for part in gather(mine) for g in part), key=lambda g: g.number):
                self._keep(group)
        self._sampling_s += time.perf_counter() - begin_s

    def _save(self) -> None:
        begin_s = time.perf_counter()
        self._saved(self._learner.save(), time.perf_counter() - begin_s)

    def _keep(self, group: Group) -> None:
        self._record.sampled(group)
        self._submit(group.number)

    def _submit(self, number: int) -> None:
        """Have a group graded that is on record without grades."""
        group = self._record.groups.get(number)
        if self._graders is None or group is None or number in self._record.verdicts:
            return
        self._grading[number] = [self._graders.submit(number, self._seed, answer.rollout) for answer in group.answers]

    def _graded(self, groups: Sequence[int]) -> list[tuple[Verdict, ...]]:
        """The grades of some groups, on every rank.

        Raises:
            Fault: the grader is late.
        """
        until_s = time.monotonic() + self._how.timeout_s
        problem: Exception | None = None
        for number in groups:
            try:
                for_all = tuple(
                    one.result(max(0.0, until_s - time.monotonic())) for one in self._grading.pop(number, ())
                )
            except TooLate:
                problem = Fault(f"the grader has no grades of task {number} after {self._how.timeout_s:g} s.")
                break
            except (ConfigError, Fault) as error:
                problem = error
                break
            if for_all:
                self._record.graded(number, for_all)
        told = [self._record.verdicts.get(number, ()) for number in groups]
        found, failed = gather((told, problem))[0]
        if failed is not None:
            raise failed
        return found

    def _publish(self, version: int) -> None:
        assert version == self._learner.position.step, "the program says when"
        self._record.publish(version, self._learner.publish(self._record.snapshots).path)

    def _retire(self, version: int) -> None:
        path = self._record.published[version]
        self._record.retire(version)
        # Two versions of the same bits are one folder.
        if path not in self._record.published.values() and self._learner.peers.rank == 0:
            shutil.rmtree(path, ignore_errors=True)

    def _train(self, asked: Asked, step: int) -> bool:
        """One step; whether the run was asked to stop behind it."""
        numbers = list(asked.groups_of(step))
        verdicts = self._graded(numbers)
        groups = [self._record.groups[number] for number in numbers]
        self._alike.see(step, verdicts)
        shares, divisor = shares_of(self._rl, self._how, groups, verdicts)
        config, rl = self._learner.run.config, self._rl
        lessons = lessons_of(
            groups,
            shares,
            divisor=divisor or 1.0,
            multiple=self._learner.multiple,
            tokens=config.data.sequence_tokens,
            is_masked=config.data.is_masked,
            keeps_all=config.numerics.exact or bool(rl.kl_coef) or rl.ratio == "sequence",
        )
        result = self._step(lessons, version=groups[0].version, step=step)
        self._tell(self._learnt(step, groups, verdicts, result))
        self._record.forget(range(numbers[0], numbers[-1] + 1))
        return result.is_stop_asked

    def _step(self, lessons: Lessons, *, version: int, step: int) -> StepResult:
        batch, streams = lessons.batch, dict(lessons.batch.streams)
        is_exact, is_fresh = self._learner.run.plan.grain is not None, version == step
        policy = PolicyLoss(
            clip_low=self._rl.clip_low,
            clip_high=self._rl.clip_high,
            correction=self._rl.correction,
            watches_sampler=not is_exact,
            kl_coef=self._rl.kl_coef,
            is_fresh=is_fresh and not is_exact,
        )
        if self._rl.kl_coef:
            streams["reference"] = self._learner.reference(batch)
        is_whole = self._rl.ratio == "sequence"
        # In exact mode the sampler's are the trainer's. Else the trainer's own, where it still has these weights.
        if not policy.is_fresh:
            streams["old"] = streams["sampled"]
        if is_whole:
            logprobs = self._learner.logprobs(batch)
            if is_exact and is_fresh:
                require_same_bits(lessons, logprobs, version)
            return self._step_of_answers(lessons, policy, logprobs, streams)
        try:
            return self._learner.step(replace(batch, streams=streams), policy, is_checked=is_exact and is_fresh)
        except Differs:
            require_same_bits(lessons, self._learner.logprobs(batch), version)
            raise AssertionError("a difference was seen in the step, and none behind it") from None

    def _step_of_answers(
        self, lessons: Lessons, policy: PolicyLoss, logprobs_BS: Tensor, streams: Streams
    ) -> StepResult:
        """A step whose loss looks at whole answers: their weights are found, then trained with."""
        answer_BS, gains = lessons.answers()
        if not len(gains):
            return self._learner.step(replace(lessons.batch, streams={"weights": torch.zeros_like(logprobs_BS)}))
        weighed = sequence_policy(policy, logprobs_BS, streams, answer_BS, gains)
        batch = replace(lessons.batch, streams={"weights": weighed.weights}, divisor=float(len(gains)))
        result = self._learner.step(batch)
        return replace(result, loss=weighed.loss / len(gains), measures=weighed.measures)

    def _learnt(
        self, step: int, groups: Sequence[Group], verdicts: Sequence[Sequence[Verdict]], result: StepResult
    ) -> Learnt:
        now_s = time.perf_counter()
        seconds, self._since_s = now_s - self._since_s, now_s
        sampling_s, self._sampling_s = self._sampling_s, 0.0
        return learnt_of(
            groups,
            verdicts,
            result,
            step=step,
            lr=rate(self._learner.run.config.train, step),
            seconds=seconds,
            sampling_s=sampling_s,
        )


def _run_of_samples(lane: Sequence[object]) -> list[Sample]:
    """The samples that a lane begins with: they are drawn together."""
    found = []
    for i in lane:
        if not isinstance(i, Sample):
            break
        found.append(i)
    return found
