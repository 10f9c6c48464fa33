"""iterate: the program of a run of reinforcement learning, executed by ranks that sample and train in turn.

    ranks     publish ─ swap ─ take ─ sample g0 g1 ... ─ swap ─ train ─ save ─ ...
    grader                              └ g0 ┘ └ g1 ┘         (on rank 0, in parallel)

Each rank runs the same lane, one ``case`` for each instruction. Samples and grades are recorded at once, and sent to
all ranks; everything else follows from the record, the weights and the program.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from superstep.comm.objects import gather
from superstep.grade.environment import Tasks
from superstep.serve.compute.runner.rank_commands import Tensors
from superstep.tune.program.instructions import Grade, Iterations, Publish, Retire, Sample, Save, Swap, Take, Train
from superstep.tune.rl.from_rank0 import WaitLimit, from_first
from superstep.tune.rl.grading import Grading
from superstep.tune.rl.policy_trainer import PolicyTrainer
from superstep.tune.rl.rl_step import RlTraining
from superstep.tune.rl.rollout_log import RolloutLog
from superstep.tune.rl.rollout_worker import RolloutWorker
from superstep.tune.rl.sampling import TaskGroup


class ColocatedRank:
    """One rank.

    Args:
        seed: of the tasks.
        timeout_s: for grades.
        trainer: this rank's trainer.
        training: its steps.
        seat: its rollout worker.
        environment: of the tasks.
        record: of rollouts; rank 0 writes it.
        grading: rank 0's.
    """

    def __init__(  # noqa: PLR0913
        self,
        seed: int,
        timeout_s: float,
        trainer: PolicyTrainer,
        training: RlTraining,
        seat: RolloutWorker,
        environment: Tasks,
        record: RolloutLog,
        grading: Grading,
    ) -> None:
        self._seed = seed
        self._timeout_s = timeout_s
        self._trainer = trainer
        self._training = training
        self._seat = seat
        self._environment = environment
        self._record = record
        self._grading = grading
        self._sampling_s = 0.0

    def run(self, program: Iterations) -> None:
        """Run the whole program.

        Raises:
            Stopped: a stop was requested, and the state is saved.
            Fault: the run directory was moved or removed, and the state is saved.
        """
        self._grading.begin(program)
        lane = program.lane("ranks")
        taken: Path | Tensors | None = None
        hands_over = self._hands_over(program)
        at = 0
        while at < len(lane):
            if isinstance(lane[at], Publish | Train):  # the memory of training is allocated
                self._training.require_folder()
            match lane[at]:
                case Sample(_, version):
                    assert taken is not None, "a version was taken"
                    batch = samples_from(lane[at:])
                    self._sample(batch, version, taken)
                    at += len(batch)
                    continue
                case Take(version):
                    taken = self._record.published.get(version) or self._trainer.weights()
                case Publish(version):
                    place = None if hands_over else self._training.publish(version, self._record.snapshots)
                    self._record.publish(version, place)
                case Retire(version):
                    self._record.retire(version)
                case Swap(to):
                    # The sampler allocates its memory with a version, and frees it after the last of its groups.
                    self._trainer.sleep() if to == "sample" else self._trainer.wake()
                case Train(step):
                    self._train(program.asked.groups_of(step), step)
                case Save():
                    self._training.save()
                case Grade():
                    raise AssertionError("grades have a lane of their own")
            at += 1

    def _hands_over(self, program: Iterations) -> bool:
        """Whether versions are passed in memory: shared ranks take what they have just published, and every rank has
        the whole
        model, as its sampler needs it.
        """
        schedule = program.asked
        return schedule.placement == "shared" and self._seat.is_alone and self._trainer.weights() is not None

    def _sample(self, numbers: Sequence[int], version: int, source: Path | Tensors) -> None:
        begin_s = time.perf_counter()
        tasks = [(number, self._environment.task(number, self._seed)) for number in numbers]
        mine = []
        for group in self._seat.sample(source, version, tasks):
            mine.append(group)
            if self._trainer.peers.size == 1:
                self._keep(group)
        if self._trainer.peers.size > 1:
            for group in sorted((g for part in gather(mine) for g in part), key=lambda g: g.number):
                self._keep(group)
        self._sampling_s += time.perf_counter() - begin_s

    def _keep(self, group: TaskGroup) -> None:
        self._record.keep_answers(group)
        self._grading.submit(group.number)

    def _train(self, numbers: range, step: int) -> None:
        patience = WaitLimit(self._timeout_s)
        verdicts = from_first(
            self._trainer.peers.rank,
            lambda beat_s: self._grading.graded(numbers, beat_s, patience),
            self._training.require_folder,
        )
        groups = [self._record.groups[number] for number in numbers]
        sampling_s, self._sampling_s = self._sampling_s, 0.0
        self._training.train(step, groups, verdicts, sampling_s=sampling_s)
        self._record.forget(numbers)


def samples_from(lane: Sequence[object]) -> list[int]:
    """The groups that a lane samples first: they are sampled together."""
    versions = []
    for i in lane:
        if not isinstance(i, Sample):
            break
        versions.append(i.group)
    return versions
