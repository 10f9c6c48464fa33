"""iterate: the program of a run of reinforcement learning, executed by ranks that sample and train in turn.

    ranks     publish ─ swap ─ take ─ sample g0 g1 ... ─ swap ─ train ─ save ─ ...
    grader                              └ g0 ┘ └ g1 ┘         (on rank 0, in parallel)

Each rank runs the same lane, one ``case`` for each instruction. Samples and grades are recorded at once, and sent to
all ranks; everything else follows from the record, the weights and the program.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from superstep.comm.objects import barrier, gather
from superstep.grade.environment import Tasks
from superstep.grade.verdict import Verdict
from superstep.grade.workers.environment_process import EnvironmentProcess
from superstep.grade.workers.pool import Pool
from superstep.launch.ranks import World
from superstep.serve.compute.runner.rank_commands import Tensors
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import write_whole
from superstep.tune.program.instructions import Grade, Iterations, Publish, Retire, Sample, Save, Swap, Take, Train
from superstep.tune.program.text import write_iterations
from superstep.tune.rl.from_rank0 import WaitLimit, from_first
from superstep.tune.rl.grading import Grading, Retried, nothing_retried
from superstep.tune.rl.job import (
    PROGRAM,
    RlJob,
    follow_rollback,
    open_log,
    serve_of,
    with_room,
    worker_settings,
)
from superstep.tune.rl.memory_budget import beside_communicators, sampler_plan
from superstep.tune.rl.policy_trainer import PolicyTrainer, start_trainer
from superstep.tune.rl.rl_step import RlTraining, RunEnded, RunWentBack, Tell, TellSave, tell_nobody
from superstep.tune.rl.rollout_log import RolloutLog
from superstep.tune.rl.rollout_worker import RolloutWorker
from superstep.tune.rl.sampling import TaskGroup, words_of


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
                    self._train(program.schedule.groups_of(step), step)
                case Save():
                    self._training.save()
                case Grade():
                    raise AssertionError("grades have a lane of their own")
            at += 1

    def _hands_over(self, program: Iterations) -> bool:
        """Whether versions are passed in memory: shared ranks take what they have just published, and every rank has
        the whole model, as its sampler needs it.
        """
        schedule = program.schedule
        return schedule.placement == "shared" and self._seat.is_alone and self._trainer.weights() is not None

    def _sample(self, places: Sequence[int], version: int, source: Path | Tensors) -> None:
        begin_s = time.perf_counter()
        numbers = [self._record.task(place) for place in places]
        tasks = [(number, self._environment.task(number, self._seed)) for number in numbers]
        mine = []
        for group in self._seat.sample(source, version, tasks):
            mine.append(group)
            if self._trainer.peers.size == 1:
                self._keep(group)
        if self._trainer.peers.size > 1:
            for group in sorted((g for part in gather(mine, list[TaskGroup]) for g in part), key=lambda g: g.number):
                self._keep(group)
        self._sampling_s += time.perf_counter() - begin_s

    def _keep(self, group: TaskGroup) -> None:
        self._record.keep_answers(group)
        self._grading.submit(self._record.place(group.number))

    def _train(self, numbers: range, step: int) -> None:
        patience = WaitLimit(self._timeout_s)
        verdicts = from_first(
            self._trainer.peers.rank,
            lambda beat_s: self._grading.collect(numbers, beat_s, patience),
            list[tuple[Verdict, ...]],
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


def reinforce(
    world: World,
    job: RlJob,
    tell: Tell = lambda learnt: None,
    tell_save: TellSave = tell_nobody,
    retried: Retried = nothing_retried,
) -> bool:
    """One rank, from assembly to the last step; whether it stopped early on request."""
    record = _open_log(world, job)
    environment = EnvironmentProcess(job.rl.environment, job.rollout.reply_timeout_s)
    words = words_of(job.start)
    job = _with_room(world, job)
    trainer = start_trainer(world, job)
    seed = job.run.config.train.seed
    serve = serve_of(job.run, job.rollout, job.kernels)
    seat = RolloutWorker(world, worker_settings(job, serve), words, environment)
    with ExitStack() as stack:
        stack.callback(environment.close)
        stack.callback(words.template.close)
        stack.callback(lambda: record.close())
        graders = None
        if world.rank == 0:
            graders = stack.enter_context(Pool(job.rl.environment, job.grade, retried=retried))
            trainer.watch = stack.enter_context(FolderWatch(job.folder, job.files))
        while True:
            if world.rank == 0:
                write_whole(job.folder.root / PROGRAM, write_iterations(job.program))
            training = RlTraining(job.rl, job.rollout, job.run.config.train.steps, trainer, tell, tell_save)
            grading = Grading(record, graders, seed)
            timeout_s = job.rollout.timeout_s
            iterate = ColocatedRank(seed, timeout_s, trainer, training, seat, environment, record, grading)
            try:
                iterate.run(job.program)
                is_stopped = False
                break
            except RunEnded:
                is_stopped = True
                break
            except RunWentBack as back:
                record.close()
                job = follow_rollback(job, back.to_step, back.skip, rank=world.rank, device=world.device)
                record = _open_log(world, job)
    seat.close()
    trainer.close()
    return is_stopped


def _open_log(world: World, job: RlJob) -> RolloutLog:
    """The record of the groups that are still to be trained on. Every rank calls this together."""
    # The others read the record before rank 0 adds to it, which takes a collective.
    others = None if world.rank == 0 else open_log(job, is_kept=False)
    barrier(world.device)
    if others is not None:
        return others
    record = open_log(job, is_kept=True)
    record.tidy()
    return record


def _with_room(world: World, job: RlJob) -> RlJob:
    """The job with as many pages as fit on each rank's GPU. On CPUs they are known beforehand."""
    if world.device.kind == "cpu":
        return job
    both = job.run.plan, sampler_plan(job.run, serve_of(job.run, job.rollout, job.kernels)).plan
    free_bytes = beside_communicators(world.device.free_bytes(1), *both)
    rollout = with_room(job.run, job.rl, job.rollout, job.program, free_bytes, gives_back=True)
    pages = gather(rollout.pages, int | None)
    return replace(job, rollout=replace(rollout, pages=min(each for each in pages if each)))
