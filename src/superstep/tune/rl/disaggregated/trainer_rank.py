"""A rank that trains while others sample: its lane of the program, and on rank 0 the hub to the samplers."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from superstep.grade.workers.pool import Pool
from superstep.launch.ranks import World
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import write_whole
from superstep.tune.program.instructions import Iterations, Publish, Save, Train
from superstep.tune.program.text import write_iterations
from superstep.tune.rl.disaggregated.disaggregated import owners_of, require_own_room, samplers_of
from superstep.tune.rl.disaggregated.hub_messages import RemainingProgram
from superstep.tune.rl.disaggregated.rollout_hub import GradedGroups, RolloutHub, TaskWindow
from superstep.tune.rl.from_rank0 import WaitLimit, from_first
from superstep.tune.rl.grading import Grading, Retried, nothing_retried
from superstep.tune.rl.job import PROGRAM, RlJob, follow_rollback, open_log
from superstep.tune.rl.policy_trainer import PolicyTrainer, start_trainer
from superstep.tune.rl.rl_step import RlTraining, RunEnded, RunWentBack, Tell, TellSave, tell_nobody
from superstep.tune.rl.rollout_log import SNAPSHOTS


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

        def receive(beat_s: float) -> GradedGroups | None:
            assert self._exchange is not None, "rank 0 has it"
            return self._exchange.wait(numbers, beat_s, patience)

        groups, verdicts = from_first(self._trainer.peers.rank, receive, GradedGroups, self._training.require_folder)
        self._training.train(step, groups, verdicts, sampling_s=time.perf_counter() - begin_s)
        if self._exchange is not None:
            self._exchange.forget(numbers)


def train_apart(
    world: World,
    job: RlJob,
    tell: Tell = lambda learnt: None,
    tell_save: TellSave = tell_nobody,
    retried: Retried = nothing_retried,
) -> bool:
    """One training rank, from assembly to the last step; whether it stopped early on request."""
    require_own_room(world, job, "trainer")
    trainer = start_trainer(world, job)
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
            job = follow_rollback(job, end.to_step, end.skip, rank=world.rank, device=world.device)
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
