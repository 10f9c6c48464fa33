"""A run of the training loop, from its directory to the last step: what every rank is told, and what it does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from superstep.cli.choices import passes_of_a_step
from superstep.cli.plan_line import plan_text
from superstep.cli.report import leave_report
from superstep.cli.train.disk_fit import require_disk
from superstep.cli.train.display import open_display, restore
from superstep.cli.train.exit_messages import ended, stopped
from superstep.cli.train.launch_rules import check_launch
from superstep.cli.train.memory_fit import require_fit
from superstep.cli.train.prediction import foretold, peak_of
from superstep.cli.train.recovering import Recovered, recovering
from superstep.cli.train.samples import sampling
from superstep.cli.train.sinks import open_trackers, sinks
from superstep.comm.device import Device, choose
from superstep.comm.objects import gather
from superstep.cost.program import lora
from superstep.cost.program.flops import MFU_CONVENTION
from superstep.cost.program.op_prices import Measured
from superstep.cost.program.operation import UnitOperations
from superstep.cost.program.predict import predict
from superstep.cost.program.prediction_file import PredictedFrom, write_predicted_from
from superstep.cost.program.snapshot_memory import snapshot_bytes
from superstep.data.token_files import CorpusManifest, open_corpus
from superstep.engine.choose_attention import kernel_of
from superstep.engine.measure.probe_machine import measure_here
from superstep.errors import Fault
from superstep.launch.ranks import World, launch_apart, launch_on
from superstep.launch.stop_request import STOPPED, listening
from superstep.observe.events import Fanout, Resumed, RunStarted, Sink, Warned
from superstep.observe.goodput import Counted, spent_s
from superstep.observe.jsonl import damage
from superstep.observe.trackers import Tracker
from superstep.plan.config import DeviceKind
from superstep.plan.config_io import read_config, write_config
from superstep.plan.resolve import Resolved
from superstep.planner.goodput import DISK_BYTES_PER_S, STATE_BYTES, unhurt
from superstep.state.background_checkpoint import Flusher
from superstep.state.checkpoint import read_position
from superstep.state.manifest import Position
from superstep.state.memory_snapshot import Handles, made
from superstep.state.store_sync import fetch_newest, mirrored
from superstep.state.verify import newest, verify
from superstep.train import run_directory
from superstep.train.batches import stream_of
from superstep.train.checkpoint_store import store_of
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.failure_report import leaving_words
from superstep.train.folder_watch import FolderWatch
from superstep.train.identity import identity_of, require_same_run
from superstep.train.initial_weights import check_start
from superstep.train.loop import train
from superstep.train.model import flops_per_token, operations
from superstep.train.policy.sequence_loss import SequenceLoss
from superstep.train.report_status import ToldBeside
from superstep.train.resume import resume
from superstep.train.run_lock import hold, sharing
from superstep.train.run_paths import RunFolder, write_whole
from superstep.train.throughput import PeakRate

Tokens = Callable[[Resolved, RunFolder, Path | None], Path]
"""Makes the folder of token files of a run, or finds it; given the checkpoint that it goes on from."""

Length = Callable[[Resolved, Path], Resolved]
"""The run with as many steps as its tokens make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What every rank is told."""

    run: Resolved
    folder: RunFolder
    corpus: Path
    checkpoint: Path | None
    was_complete: bool
    """Whether it goes on beyond what was its last step: then what follows a demo has been seen."""
    operations: tuple[UnitOperations, ...] | None
    """What the units do; None where it cannot be told before they run."""
    flops_per_token: float | None
    verb: str = "train"
    """The words after superstep that go on with the run."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts to write into the run directory, by name."""
    lesson: SequenceLoss | None = None
    """What is learnt of a batch, where that is not each of its targets."""
    snapshots: Handles | None = None
    """The ranks' memories that outlive them, where there are any."""
    recovered: Recovered | None = None
    """What was lost, where something was, and the snapshot to go on from in the place of the checkpoint."""
    asked: Resolved | None = None
    """The run as it was asked for, where it goes on under a plan for fewer ranks: the directory keeps that one."""
    epoch: int = 0
    """How often launchers of several hosts have started ranks: none of them has all memories, and ranks write
    checkpoints. 0 where one launcher does."""
    began_at_s: float = 0.0
    """When the launch began, in seconds since 1970."""
    earlier_s: float = 0.0
    """What launches of the run before this one took."""


def asked_device(job: TrainJob | None) -> DeviceKind | None:
    """The device that a run asks for."""
    return None if job is None else job.run.config.plan.device


def launched(job: TrainJob, worker: Callable[[World, TrainJob], bool] | None = None) -> int | None:
    """Train on ranks of this host; the exit status where that was not to the last step.

    Args:
        job: what every rank is told.
        worker: what each of them does; None means ``rank``.
    """
    try:
        with sampling(job.folder, job.run.config.observe.sample) as finish:
            is_stopped = _launched(job, worker or rank)
            if not is_stopped:
                finish()
    except BaseException as error:
        restore(sys.stdout)
        leave_report(job.folder)
        if (status := ended(error, job.folder, job.verb)) is not None:
            return status
        raise
    return stopped(job.folder, job.verb) if is_stopped else None


def _launched(job: TrainJob, worker: Callable[[World, TrainJob], bool]) -> bool:
    """Whether the run was asked to stop; where ranks are lost and there are snapshots, it is gone on with."""
    world, state = job.run.plan.mesh.world, job.run.config.state
    with suppress(OSError):  # of a launch before this one
        job.folder.fault.unlink()
    if state.snapshot_every is None:
        return leaving_words(job.folder, lambda: launch_on(asked_device(job), world, worker, job))
    kind = choose(asked_device(job), world)
    handles, memories = made(world)
    try:
        with Flusher(memories, job.folder.root, keep=state.keep) as flusher:
            return recovering(
                lambda lost: leaving_words(
                    job.folder, lambda: launch_apart(kind, world, worker, _again(job, handles, lost))
                ),
                memories,
                flusher.idle,
            )
    finally:
        for memory in memories:
            memory.close()


def _again(job: TrainJob, handles: Handles, lost: Recovered | None) -> TrainJob:
    """What ranks are told that start with memories, for the first time or after some were lost."""
    told = replace(job, snapshots=handles, recovered=lost)
    return told if lost is None or lost.step is not None else replace(told, checkpoint=newest(job.folder.checkpoints))


@contextmanager
def prepared_job(
    run: Resolved,
    tokens: Tokens,
    *,
    verb: str = "train",
    files: Mapping[str, str] | None = None,
    lesson: SequenceLoss | None = None,
    length: Length | None = None,
    hosts: int = 1,
) -> Iterator[TrainJob | None]:
    """The run's directory, held for the length of the block, and the tokens in their place; None where there is
    nothing left to do. With several hosts this is for the first one's launcher to do.
    """
    check_launch(run.config, hosts)
    began_at_s = time.time()
    run, folder, checkpoint = run_directory.choose(run)
    store = store_of(run, checkpoint)
    if checkpoint is None:
        check_start(run)
    seen = operations(run)
    here = run.plan.mesh.world // hosts
    # torchrun says how many of its ranks are on this host, srun does not.
    local = os.environ.get("LOCAL_WORLD_SIZE", "1" if "RANK" in os.environ else here)
    if choose(run.config.plan.device, int(local)) == "cpu":
        # What a GPU has left its rank alone can tell: to ask takes a part of it.
        require_fit(run, Device("cpu"), seen, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", here)))
    with hold(folder), mirrored(folder.checkpoints, store, run.config.state.keep):
        if store is not None and run.config.state.existing == "resume":
            for told in fetch_newest(store, folder.checkpoints):
                print(told, flush=True)
            checkpoint = newest(folder.checkpoints)
        if checkpoint is not None:  # what was left of the run before may have come to its end only now
            checkpoint = newest(folder.checkpoints)
        if checkpoint is not None:
            require_same_run(checkpoint, identity_of(run))
        step = 0 if checkpoint is None else read_position(checkpoint).step
        corpus = None if length is None else tokens(run, folder, checkpoint)
        if length is not None and corpus is not None:
            run = length(run, corpus)
        if checkpoint is not None and step >= run.config.train.steps:  # nobody will read it again: every byte, then
            checkpoint = newest(folder.checkpoints, verify)
            step = 0 if checkpoint is None else read_position(checkpoint).step
        if step >= run.config.train.steps:
            print(
                f"The run in {folder.root} is complete at step {step}; raise --train.steps to go on with it.",
                flush=True,
            )
            yield None
        else:
            require_disk(run, folder, step)
            corpus = corpus or tokens(run, folder, checkpoint)
            _say_passes(run, corpus)
            yield TrainJob(
                run=run,
                folder=folder,
                corpus=corpus,
                checkpoint=checkpoint,
                was_complete=checkpoint is not None
                and folder.config.is_file()  # it is not where the checkpoint came from a store
                and step >= read_config(folder.config).train.steps,
                operations=seen,
                flops_per_token=flops_per_token(run, seen),
                verb=verb,
                files=files or {},
                lesson=lesson,
                began_at_s=began_at_s,
                earlier_s=spent_s(folder.metrics),
            )


def _say_passes(run: Resolved, corpus: Path) -> None:
    """Say where a step goes over the data more than once."""
    opened, batch = open_corpus(corpus), run.config.train.batch_sequences
    if opened.manifest.train_tokens >= (batch + 1) * run.config.data.sequence_tokens:
        return  # then there are as many sequences, and nobody need count them
    passes = passes_of_a_step(batch, stream_of(run.config, opened, "train").sequences)
    if passes is not None:
        print(passes, flush=True)


def rank_of_torchrun(world: World, job: TrainJob | None) -> int:
    """One rank's exit status; rank 0 speaks for all."""
    if job is None:
        return 0
    try:
        is_stopped = rank(world, job)
    except (KeyboardInterrupt, SystemExit, Fault) as error:
        if world.rank == 0 and (status := ended(error, job.folder, job.verb)) is not None:
            return status
        raise
    if is_stopped and world.rank == 0:
        return stopped(job.folder, job.verb)
    return STOPPED if is_stopped else 0


def watch_of(job: TrainJob) -> FolderWatch:
    """A watch of the run directory, which knows what a folder in its place needs to be gone on with."""
    return FolderWatch(job.folder, {job.folder.config.name: write_config((job.asked or job.run).config), **job.files})


def rank(world: World, job: TrainJob) -> bool:
    """One rank, from assembly to the last step; whether it was asked to stop before that, and has.

    Raises:
        Fault: torch raised what it raises wherever something breaks below it: memory, a connection, a kernel.
    """
    try:
        with listening(world.stop), sharing(job.folder):
            return _train(world, job)
    except RuntimeError as error:
        raise Fault(str(error).partition("\n")[0], rank=world.rank) from error


def _train(world: World, job: TrainJob) -> bool:
    if world.device.kind == "cuda":
        require_fit(job.run, world.device, job.operations)
    machine = None if job.operations is None else measure_here(job.run, job.operations, world)
    peak = peak_of(job.run, world.device, machine)
    rate = PeakRate(flops_per_token=job.flops_per_token, peak_flops=peak)
    trainer = CorpusTrainer(world, job.run, job.folder, job.corpus, rate, lesson=job.lesson)
    position, resumed = _begun(trainer, world, job)
    trainer.recall(position)
    predicted_step_s = None
    with ExitStack() as stack:
        sink: Sink = Fanout(())
        if world.rank == 0:
            # Whatever can be refused has been: only now does the directory become, or change, a run.
            trackers = open_trackers(job.run.config, job.folder)
            had_begun = job.folder.metrics.exists()
            run_directory.write(job.asked or job.run, job.folder)
            for name, text in job.files.items():
                write_whole(job.folder.root / name, text)
            trainer.describe()
            trainer.watch = stack.enter_context(watch_of(job))
            sink = ToldBeside(world.heart, _sink(job, stack, peak, trackers))
            manifest = open_corpus(job.corpus).manifest
            if machine is not None:
                _keep_predicted_from(job, machine)
            started = _started(job, world, trainer.transport, manifest, machine, position.step)
            started = replace(started, snapshots_unpinned=trainer.unpinned)
            predicted_step_s = started.predicted_step_s
            sink.write(started)
            if resumed is not None:
                sink.write(resumed)
            elif had_begun:
                sink.write(Resumed(step=position.step, path=""))
            if text := damage(job.folder.metrics):
                sink.write(Warned(step=position.step, text=text))
        # Whoever may be taken to hang, before it has done the step once, is given a multiple of that.
        world.heart.expect(gather(predicted_step_s)[0] or 0.0)
        position = train(trainer, position, sink)
    # Only here: after a failure the process ends, and to wait for ranks that are gone would hide why.
    trainer.close()
    return position.step < job.run.config.train.steps


def _begun(trainer: CorpusTrainer, world: World, job: TrainJob) -> tuple[Position, Resumed | None]:
    """Where training stands: at the start, after the newest checkpoint, or after a snapshot; and what is told of it."""
    memory = None if job.snapshots is None else job.snapshots.of(world.rank)
    lost = job.recovered
    step = None if lost is None else lost.step
    # Frozen weights and a lesson's reference are in no snapshot.
    is_all_there = job.run.config.lora is None and job.lesson is None
    start = None
    position = Position()
    if step is None or not is_all_there:
        start = None if job.checkpoint is None else resume(trainer, job.checkpoint.parent)
        position = trainer.start() if start is None else start.position
    if memory is not None:
        position = trainer.keep_snapshots(memory, step, epoch=job.epoch) or position
    told = Resumed(step=position.step, path="")
    if lost is not None:
        told = replace(told, joined=lost.lost) if lost.is_gain else replace(told, lost=lost.lost)
        told = replace(told, lost_at_s=lost.lost_at_s, passed_over=lost.passed_over)
    if start is None or step is not None:
        return position, None if lost is None else told
    passed_over = start.set_damaged_aside() if world.rank == 0 else ()
    return position, replace(told, path=str(start.path), passed_over=told.passed_over + passed_over)


def _sink(job: TrainJob, stack: ExitStack, peak: float | None, trackers: dict[str, Tracker]) -> Sink:
    observe = job.run.config.observe
    against = "no peak is known" if peak is None else f"peak {peak / 1e9:,.0f} GFLOP/s a rank"
    convention = f"{MFU_CONVENTION if job.run.config.lora is None else lora.CONVENTION}; {against}"
    display = stack.enter_context(open_display(sys.stdout, mfu_convention=convention, log_every=observe.log_every))
    opened = Fanout(sinks(observe, job.folder, display, trackers))
    counted = Counted(opened, job.folder.metrics, began_at_s=job.began_at_s, earlier_s=job.earlier_s)
    stack.callback(counted.close)
    return counted


def _keep_predicted_from(job: TrainJob, machine: Measured) -> None:
    """Write down from what the step is predicted, so that ``superstep view`` shows the same prediction."""
    given = PredictedFrom(is_weighed=job.lesson is not None, plan=job.run.config.plan, machine=machine)
    write_whole(job.folder.prediction, write_predicted_from(given))


def _started(
    job: TrainJob, world: World, transport: str, manifest: CorpusManifest, machine: Measured | None, step: int
) -> RunStarted:
    prediction = (
        None if machine is None else predict(job.run, machine, job.operations, is_weighed=job.lesson is not None)
    )
    parts = foretold(job.run, job.operations, prediction)
    return RunStarted(
        run=str(job.folder.root),
        plan=plan_text(job.run),
        parameters=job.run.outline.numel,
        world=world.size,
        transport=transport,
        attention=kernel_of(job.run, world.device),
        steps=job.run.config.train.steps,
        unigram_entropy=manifest.unigram_nats,
        predicted_step_s=prediction.step_s if prediction else None,
        predicted_ettr=None if prediction is None else _foreseen(job, step, prediction.step_s),
        predicted_memory_bytes=prediction.memory_bytes if prediction else None,
        predicted_spent_s=parts.spent_s,
        predicted_bytes=parts.bytes,
        predicted_traffic_bytes=parts.traffic_bytes,
        snapshot_bytes=snapshot_bytes(job.run),
        memory="resident" if world.device.kind == "cpu" else "allocated",
    )


def _foreseen(job: TrainJob, step: int, step_s: float) -> float:
    """How much of this launch's time will make headway from a step on, if nothing fails."""
    config = job.run.config
    left = max(1, config.train.steps - step)
    # A forward pass is a third of a step's work; a snapshot is saved beside training, all but the last.
    validations_s = -(-left // config.train.eval_every) * config.train.eval_batches * step_s / 3
    is_flushed = config.state.snapshot_every is not None and job.epoch == 0
    saves = 1 if is_flushed else -(-left // config.state.save_every)
    save_s = STATE_BYTES * job.run.outline.numel / DISK_BYTES_PER_S
    elapsed_s = time.time() - job.began_at_s
    return unhurt(elapsed_s=elapsed_s, steps_s=left * step_s, validations_s=validations_s, saves_s=saves * save_s)
