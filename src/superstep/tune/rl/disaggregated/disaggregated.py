"""Ranks apart: some sample and others train, each in processes of their own, on one host or on several.

    trainer     publish v0 ─────────────── train s0 ─ publish v1 ─ train s1 ─ publish v2 ...
                         └▶ sampler    take v0 ─ sample g0 to g3 ─ retire v0 ─ take v1 ─ sample g4, g5 ...
                            grader                 └ g0 ┘ └ g1 ┘               (on the trainer's rank 0)

Each runs its own lane of the program. Results of other lanes arrive over the connections of ``RolloutHub``; the program
says which version samples which group, independent of timing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from superstep.comm.objects import barrier, gather
from superstep.errors import StateError
from superstep.grade.environment import Tasks
from superstep.grade.workers.environment_process import EnvironmentProcess
from superstep.grade.workers.pool import Pool
from superstep.launch.ranks import RankWorld, World
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import write_whole
from superstep.tune.program.instructions import Iterations, Publish, Retire, Sample, Save, Take, Train
from superstep.tune.program.memory import require_room
from superstep.tune.program.text import write_iterations
from superstep.tune.rl.colocated import samples_from
from superstep.tune.rl.disaggregated.hub_connection import HubConnection
from superstep.tune.rl.disaggregated.hub_messages import RemainingProgram, Retired, SampledGroup, SamplerHello
from superstep.tune.rl.disaggregated.rollout_hub import Lesson, RolloutHub, TaskWindow
from superstep.tune.rl.from_rank0 import WaitLimit, from_first
from superstep.tune.rl.grading import Grading, Retried, nothing_retried
from superstep.tune.rl.job import (
    PROGRAM,
    RlJob,
    continue_from,
    note_rollback,
    open_log,
    own_ranks,
    serve_of,
    started_trainer,
    worker_settings,
)
from superstep.tune.rl.memory_budget import beside_communicators, pages_for, sampler_plan, sizes_of
from superstep.tune.rl.policy_trainer import PolicyTrainer
from superstep.tune.rl.rl_step import RlTraining, RunEnded, RunWentBack, Tell, TellSave, tell_nobody
from superstep.tune.rl.rollout_log import SNAPSHOTS
from superstep.tune.rl.rollout_worker import RolloutWorker, TrainerLeft
from superstep.tune.rl.sampling import words_of

REMOVAL_S = 1.0
"""Seconds to wait for a version's folder to be removed."""


def samplers_of(job: RlJob) -> int:
    """Number of samplers: each is a world of ``rollout.tp`` ranks."""
    return own_ranks(job.rollout) // job.rollout.tp


class TrainerLane:
    """One training rank.

    Args:
        trainer: this rank's trainer.
        training: its steps.
        exchange: rank 0's; None on the others.
        snapshots: their folder.
        timeout_s: for samplers and graders.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        training: RlTraining,
        exchange: RolloutHub | None,
        snapshots: Path,
        timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._training = training
        self._exchange = exchange
        self._snapshots = snapshots
        self._timeout_s = timeout_s

    def run(self, program: Iterations) -> None:
        """Run the whole lane.

        Raises:
            Stopped: a stop was requested, and the state is saved.
            Fault: the run directory was moved or removed, and the state is saved.
        """
        for i in program.lane("trainer"):
            self._training.require_folder()
            match i:
                case Publish(version):
                    self._publish(version)
                case Train(step):
                    self._train(program.schedule.groups_of(step), step)
                case Save():
                    self._training.save()
                case _:
                    raise AssertionError("the trainer does none of these")

    def _publish(self, version: int) -> None:
        write = partial(self._training.publish, version, self._snapshots)
        if self._exchange is None:
            write()
        else:
            self._exchange.publish(version, write)

    def _train(self, numbers: range, step: int) -> None:
        begin_s = time.perf_counter()
        patience = WaitLimit(self._timeout_s)

        def found(beat_s: float) -> Lesson | None:
            assert self._exchange is not None, "rank 0 has it"
            return self._exchange.wait(numbers, beat_s, patience)

        groups, verdicts = from_first(self._trainer.peers.rank, found, Lesson, self._training.require_folder)
        self._training.train(step, groups, verdicts, sampling_s=time.perf_counter() - begin_s)
        if self._exchange is not None:
            self._exchange.forget(numbers)


class SamplerLane:
    """One rank of a sampler.

    Args:
        seat: its rollout worker.
        line: to the trainer.
        environment: of the tasks.
        seed: of the tasks.
        tasks: task numbers of places that have exchanged theirs.
    """

    def __init__(
        self, seat: RolloutWorker, line: HubConnection, environment: Tasks, seed: int, tasks: Mapping[int, int]
    ) -> None:
        self._seat = seat
        self._line = line
        self._environment = environment
        self._seed = seed
        self._tasks = tasks
        self._has_left = False

    def run(self, program: Iterations) -> None:
        """Run the lane, until its end or until the trainer needs no more."""
        lane = program.lane("sampler")
        taken: Path | None = None
        at = 0
        while at < len(lane):
            match lane[at]:
                case Take(version):
                    # Ranks that share a model must leave together.
                    taken, *_ = paths = gather(self._line.version(version), Path | None)
                    if None in paths:
                        return
                case Sample(_, version):
                    assert taken is not None, "a version was taken"
                    batch = samples_from(lane[at:])
                    self._sample(batch, version, taken)
                    if any(gather(self._has_left, bool)):
                        return
                    at += len(batch)
                    continue
                case Retire(version):
                    if self._seat.is_first:
                        self._line.tell(Retired(version))
                case _:
                    raise AssertionError("a sampler does none of these")
            at += 1

    def _sample(self, places: list[int], version: int, folder: Path) -> None:
        numbers = [self._tasks.get(place, place) for place in places]
        tasks = [(number, self._environment.task(number, self._seed)) for number in numbers]
        try:
            for group in self._seat.sample(folder, version, tasks, self._look):
                self._line.tell(SampledGroup(group))
        except (StateError, OSError):
            if not self._is_removed(folder) or not self._line.ends_within():
                raise
            self._has_left = True

    def _is_removed(self, folder: Path) -> bool:
        """Whether a version's folder is gone, most likely with the run directory. The trainer will detect that, save
        the state and end the run; it could not if a sampler failed first.
        """
        return self._line.ends_within(REMOVAL_S) or not folder.exists()

    def _look(self) -> None:
        """Called after each step of the engine."""
        if self._line.is_over:
            self._has_left = True
            raise TrainerLeft


def owners_of(program: Iterations, samplers: int) -> dict[int, int]:
    """The sampler of each group: groups that are sampled together are divided in turn."""
    lane = program.lane("sampler")
    owners: dict[int, int] = {}
    at = 0
    while at < len(lane):
        batch = samples_from(lane[at:])
        owners |= {number: nth % samplers for nth, number in enumerate(batch)}
        at += max(1, len(batch))
    return owners


def train_apart(
    world: World,
    job: RlJob,
    tell: Tell = lambda learnt: None,
    tell_save: TellSave = tell_nobody,
    retried: Retried = nothing_retried,
) -> bool:
    """One training rank, from assembly to the last step; whether it stopped early on request."""
    require_own_room(world, job, "trainer")
    trainer = started_trainer(world, job)
    with ExitStack() as stack:
        graders = None
        if world.rank == 0:
            graders = stack.enter_context(Pool(job.rl.environment, job.grade, retried=retried))
            trainer.watch = stack.enter_context(FolderWatch(job.folder, job.files))
        for attempt in itertools.count():
            training = RlTraining(job.rl, job.rollout, job.program.schedule.steps, trainer, tell, tell_save)
            end = _train_program(world, job, trainer, training, graders, attempt)
            if end is None or isinstance(end, RunEnded):
                break
            if world.rank == 0:
                note_rollback(job, end)
            barrier(world.device)  # the others read it
            job = continue_from(job, end.to_step)
    trainer.close()
    return end is not None


def _train_program(
    world: World, job: RlJob, trainer: PolicyTrainer, training: RlTraining, graders: Pool | None, attempt: int
) -> RunEnded | RunWentBack | None:
    """Run the trainer's lane; why it ended before the last step, if it did."""
    end: RunEnded | RunWentBack | None = None
    with ExitStack() as stack:
        exchange = None if graders is None else _open_hub(world, job, stack, graders, attempt)
        lane = TrainerLane(trainer, training, exchange, job.folder.root / SNAPSHOTS, job.rollout.timeout_s)
        try:
            lane.run(job.program)
        except (RunEnded, RunWentBack) as error:
            end = error
        if exchange is not None:
            exchange.finish(goes_on=isinstance(end, RunWentBack))
    return end


def _open_hub(world: World, job: RlJob, stack: ExitStack, graders: Pool, attempt: int) -> RolloutHub:
    """Rank 0's record of rollouts, and its connections."""
    assert world.store is not None, "the ranks were launched"
    record = open_log(job, is_kept=True)
    stack.callback(record.close)
    record.tidy()
    text = write_iterations(job.program)
    write_whole(job.folder.root / PROGRAM, text)
    grading = Grading(record, graders, job.run.config.train.seed)
    grading.begin(job.program)
    samplers = samplers_of(job)
    exchange = RolloutHub(
        world.store,
        record,
        grading,
        program=RemainingProgram(text, dict(job.tasks)),
        samplers=samplers,
        ranks=job.rollout.tp,
        owners={job.tasks.get(place, place): owner for place, owner in owners_of(job.program, samplers).items()},
        window=TaskWindow(job.rl.window, job.program.schedule),
        timeout_s=job.rollout.timeout_s,
        attempt=attempt,
    )
    return stack.enter_context(exchange)


def sample_apart(world: World, job: RlJob, number: int) -> None:
    """One rank of a sampler, until the trainer needs no more.

    Args:
        world: the ranks that share the sampler's model.
        job: of the run.
        number: of the sampler.
    """
    assert world.store is not None, "the ranks were launched"
    pages = require_own_room(world, job, "sampler")
    serve = serve_of(job.run, replace(job.rollout, pages=pages), job.kernels)
    environment = EnvironmentProcess(job.rl.environment, job.rollout.reply_timeout_s)
    words = words_of(job.start)
    with ExitStack() as stack:
        stack.callback(environment.close)
        stack.callback(words.template.close)
        seat = RolloutWorker(world, worker_settings(job, serve), words, environment, others=(number, samplers_of(job)))
        hello, goes_on, attempts = SamplerHello(number, world.rank), True, itertools.count()
        while goes_on:
            line = HubConnection(world.store, hello, job.rollout.timeout_s, next(attempts))
            program, tasks = line.program()
            SamplerLane(seat, line, environment, job.run.config.train.seed, tasks).run(program)
            goes_on = line.close()
        seat.close()


def require_own_room(world: World, job: RlJob, who: Literal["sampler", "trainer"]) -> int | None:
    """Check memory, and choose the pages of the KV cache. On a CPU both are known before the launch.

    Raises:
        ConfigError: something does not fit on this rank's GPU.
    """
    if world.device.kind == "cpu":
        return job.rollout.pages
    serve = serve_of(job.run, job.rollout, job.kernels)
    plan = job.run.plan if who == "trainer" else sampler_plan(job.run, serve).plan
    free_bytes = beside_communicators(world.device.free_bytes(1), plan)
    pages = min(gather(pages_for(job.run, serve, free_bytes), int))
    require_room(job.program, sizes_of(job.run, serve, job.rl, pages=pages, gives_back=True), {who: free_bytes})
    return pages


def worlds_of(
    job: RlJob,
    train: Callable[..., Any],
    sample: Callable[..., Any],
    **given: Any,  # noqa: ANN401
) -> list[RankWorld]:
    """The worlds of a run: the trainer's, and one for each sampler that has ranks of its own.

    Args:
        job: of the run.
        train: runs a trainer's rank, with its world, the job and what is given.
        sample: runs a sampler's rank, with its world, the job and the sampler's number.
        given: named arguments of ``train``.
    """
    name = "trainer" if samplers_of(job) else ""
    trainer = RankWorld(name=name, size=job.run.plan.mesh.world, worker=train, args=(job,), kwargs=given)
    samplers = [
        RankWorld(name=f"sampler {number}", size=job.rollout.tp, worker=sample, args=(job, number))
        for number in range(samplers_of(job))
    ]
    return [trainer, *samplers]
