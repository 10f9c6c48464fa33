"""A run of reinforcement learning: its job, and what is left of it after a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from superstep.comm.device import Device, choose
from superstep.comm.objects import barrier
from superstep.errors import ConfigError, StateError
from superstep.grade.config import GradeConfig
from superstep.grade.workers.environment_process import EnvironmentProcess
from superstep.observe.events import Resumed
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.resolution.skip_and_rollback import batches_left_out
from superstep.serve.config import ServeConfig
from superstep.state.checkpoint import read_position
from superstep.state.snapshots.memory_snapshot import Handles, SnapshotMemory
from superstep.state.verify import newest
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.program.compile import compile_iterations
from superstep.tune.program.instructions import Iterations, RlSchedule
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.initial_policy import check_run
from superstep.tune.rl.memory_budget import (
    pages_apart,
    pages_for,
    require_sizes,
    require_snapshot_room,
    sizes_of,
)
from superstep.tune.rl.rollout_log import NAME, RolloutLog
from superstep.tune.rl.rollout_worker import SamplerSettings

PROGRAM = "iterations.txt"
"""The rest of the run, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlJob:
    """The job that every rank receives.

    Attributes:
        run: the resolved run.
        rl: settings of the loss.
        rollout: settings of sampling.
        grade: limits of a grade.
        folder: the run directory.
        start: the folder of the initial model, with its tokenizer and template.
        checkpoint: where it resumes; None at its beginning.
        program: what is left to do.
        tasks: task numbers of places that have exchanged theirs; see ``RolloutLog``.
        kernels: the folder of compiled decoders; None uses torch.
        files: texts of the run directory that a resumed run needs, by name.
    """

    run: Resolved
    rl: RlConfig
    rollout: RolloutConfig
    grade: GradeConfig
    folder: RunFolder
    start: Path
    checkpoint: Path | None
    program: Iterations
    tasks: Mapping[int, int] = field(default_factory=dict)
    kernels: Path | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    snapshots: Handles | None = None
    """Memories of the training ranks that outlive them, if any."""
    recovered: int | None = None
    """The step of the snapshot from which the run resumes; None: from the checkpoint."""

    epoch: int = 0
    """How often the launchers of several hosts have started ranks; 0 with one launcher."""

    resumed: Resumed | None = None
    """How it resumes after a loss of ranks, if so."""

    def memory(self, rank: int) -> SnapshotMemory | None:
        """The snapshot memory of a rank, if any."""
        return None if self.snapshots is None else self.snapshots.of(rank)


def job_of(  # noqa: PLR0913
    run: Resolved,
    rl: RlConfig,
    rollout: RolloutConfig,
    grade: GradeConfig,
    *,
    folder: RunFolder,
    start: Path,
    checkpoint: Path | None,
    kernels: Path | None = None,
    ranks_here: int | None = None,
) -> RlJob:
    """Check that the run can begin, and make its job.

    Args:
        run: the resolved run.
        rl: what is learnt.
        rollout: how answers are sampled.
        grade: what a grade may take.
        folder: the run directory.
        start: the folder of the model that it begins with.
        checkpoint: where it goes on; None at its beginning.
        kernels: the folder of compiled decoders; None computes without.
        ranks_here: ranks on this host; None: all of them.

    Raises:
        ConfigError: a setting is invalid, or the environment's first task fails.
        StateError: the record belongs to another recipe.
    """
    check_run(run.config, rl, rollout)
    with EnvironmentProcess(rl.environment, rollout.reply_timeout_s) as environment:
        require_pure(environment, run.config.train.seed)
    step = 0 if checkpoint is None else read_position(checkpoint).step
    program, tasks = find_remaining(run, rl, rollout, folder, step)
    require_snapshot_room(program, run, folder.root)
    ranks = run.plan.mesh.world + own_ranks(rollout)
    # Only a GPU's own rank knows its free memory.
    if choose(run.config.plan.device, ranks) == "cpu":
        free_bytes = Device("cpu").free_bytes(ranks_here or ranks)
        if rollout.placement == "apart":
            pages = pages_apart(run, serve_of(run, rollout, kernels), rl, program, ranks * free_bytes)
            rollout = replace(rollout, pages=pages)
        else:
            rollout = with_room(run, rl, rollout, program, free_bytes, gives_back=False, kernels=kernels)
    return RlJob(
        run=run,
        rl=rl,
        rollout=rollout,
        grade=grade,
        folder=folder,
        start=start,
        checkpoint=checkpoint,
        program=program,
        tasks=tasks,
        kernels=kernels,
    )


def find_remaining(
    run: Resolved, rl: RlConfig, rollout: RolloutConfig, folder: RunFolder, step: int
) -> tuple[Iterations, Mapping[int, int]]:
    """The remaining program after a step, by the record; and the task of each place whose task has another number.

    Raises:
        StateError: the record belongs to another recipe.
    """
    record = RolloutLog(folder.root / NAME, is_kept=False)
    leave_out(record, run, rl, step)
    schedule = RlSchedule(
        steps=run.config.train.steps,
        groups=rl.groups,
        lag=rl.lag,
        placement=rollout.placement,
        save_every=run.config.state.save_every,
        gaps=record.gaps,
    )
    for group in record.groups.values():
        if len(group.answers) != rl.group:
            raise StateError(
                f"{folder.root / NAME} holds groups of {len(group.answers)} answers, and rl.group = {rl.group}; set it "
                "back, or begin a new run (--state.existing new)."
            )
    left = range(step * rl.groups, schedule.steps * rl.groups)
    return compile_iterations(schedule, record.cursor(schedule, step)), record.order.differences(left)


def open_log(job: RlJob, *, is_kept: bool) -> RolloutLog:
    """The record of the groups that are still to be trained on; ``is_kept`` where this process writes it."""
    record = RolloutLog(job.folder.root / NAME, is_kept=is_kept)
    leave_out(record, job.run, job.rl, job.program.cursor.step)
    record.forget(range(job.program.cursor.step * job.rl.groups))
    return record


def leave_out(record: RolloutLog, run: Resolved, rl: RlConfig, step: int) -> None:
    """Leave out what ``train.skip`` names after a step, unless that is on record."""
    for after, batches in sorted(batches_left_out(run.config.train.skip).items()):
        if after >= step and (skip := f"{after}:{batches}") not in record.skips:
            record.leave_out(skip, rl.groups)


def continue_from(job: RlJob, step: int) -> RlJob:
    """The job with the remaining program after a step, according to the record."""
    program, tasks = find_remaining(job.run, job.rl, job.rollout, job.folder, step)
    return replace(job, program=program, tasks=tasks)


def relaunch(job: RlJob, recovered: int | None) -> RlJob:
    """The job of restarted ranks: after a snapshot's step, or after the newest checkpoint."""
    checkpoint = newest(job.folder.checkpoints)
    saved = 0 if checkpoint is None else read_position(checkpoint).step
    step = saved if recovered is None else recovered
    return continue_from(replace(job, checkpoint=checkpoint, recovered=recovered), step)


def follow_rollback(job: RlJob, to_step: int, skip: str, *, rank: int, device: Device) -> RlJob:
    """The job after the run has gone back to a step. Rank 0 records that, and what the run leaves out, in the form of
    ``train.skip``. Every rank calls this together.
    """
    if rank == 0:
        record = RolloutLog(job.folder.root / NAME)
        record.go_back(to_step)
        if skip:
            record.leave_out(skip, job.rl.groups)
        record.close()
    barrier(device)  # the others read the record
    return continue_from(job, to_step)


def own_ranks(rollout: RolloutConfig) -> int:
    """Ranks that only sample."""
    return 0 if rollout.placement == "shared" else rollout.ranks or rollout.tp


def serve_of(run: Resolved, rollout: RolloutConfig, kernels: Path | None = None) -> ServeConfig:
    """Settings of the sampler's engine on each rank."""
    return ServeConfig(
        context_tokens=run.config.data.sequence_tokens,
        pages=rollout.pages,
        requests=rollout.requests,
        compute=run.config.numerics.compute,
        exact=run.config.numerics.exact,
        tp=rollout.tp,
        dp=max(1, (own_ranks(rollout) or run.plan.mesh.world) // rollout.tp),
        # Exact mode's adapters are not supported by the compiled decoder.
        kernels=None if run.config.lora is not None and run.config.numerics.exact else kernels,
    )


def worker_settings(job: RlJob, serve: ServeConfig) -> SamplerSettings:
    """Settings of a sampler."""
    config = job.run.config
    return SamplerSettings(
        serve=serve,
        how=job.rollout,
        group=job.rl.group,
        seed=config.train.seed,
        start=job.start,
        is_beside=config.lora is not None,
    )


def with_room(
    run: Resolved,
    rl: RlConfig,
    rollout: RolloutConfig,
    program: Iterations,
    free_bytes: int,
    *,
    gives_back: bool,
    kernels: Path | None = None,
) -> RolloutConfig:
    """Sampling settings with pages that fit beside the trainer.

    Raises:
        ConfigError: an instruction of the program does not fit on a rank.
    """
    serve = serve_of(run, rollout, kernels)
    pages = pages_for(run, serve, free_bytes)
    require_sizes(program, sizes_of(run, serve, rl, pages=pages, gives_back=gives_back), free_bytes)
    return replace(rollout, pages=pages)


def require_pure(environment: EnvironmentProcess, seed: int) -> None:
    """Check that equal numbers give equal tasks, as a restart needs.

    Raises:
        ConfigError: they do not, or the file cannot be used.
        Fault: it is late.
    """
    if not environment.is_pure(0, seed):
        raise ConfigError(
            f"{environment.path}: task(0, {seed}) gives another task when it is asked again; make it a function of its "
            "two numbers, by random.Random(f'{index}:{seed}') say."
        )
