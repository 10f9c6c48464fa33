"""What each rank of a run does, from assembly to the last step."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

from superstep.comm.objects import gather
from superstep.cost.program import lora
from superstep.cost.program.flops import MFU_CONVENTION
from superstep.cost.program.memory.snapshot_memory import snapshot_bytes
from superstep.cost.program.time.op_prices import Measured
from superstep.cost.program.time.predict import predict
from superstep.cost.program.time.prediction_file import PredictedFrom, write_predicted_from
from superstep.data.token_files import CorpusManifest, open_corpus
from superstep.engine.attention.choose_attention import kernel_of
from superstep.engine.measure.probe_machine import measure_here
from superstep.errors import Fault
from superstep.launch.ranks import World
from superstep.launch.stop_request import STOPPED, listening
from superstep.observe.events import Fanout, Resumed, RunStarted, Sink, Warned
from superstep.observe.goodput import Counted
from superstep.observe.jsonl import damage
from superstep.observe.trackers import Tracker
from superstep.planner.goodput import DISK_BYTES_PER_S, STATE_BYTES, unhurt
from superstep.run.console import Console
from superstep.run.exit_messages import ended, stopped
from superstep.run.job import TrainJob, watch_of
from superstep.run.memory_check import require_fit
from superstep.run.reports.plan_line import plan_text
from superstep.run.reports.prediction import foretold, peak_of
from superstep.run.reports.sinks import open_trackers, sinks
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import train
from superstep.train.resume import resume
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.report_status import ToldBeside
from superstep.train.run_folder.run_lock import sharing
from superstep.train.run_folder.run_paths import write_whole
from superstep.train.throughput import PeakRate


def rank_of_torchrun(world: World, job: TrainJob | None, console: Console) -> int:
    """One rank's exit status; rank 0 speaks for all."""
    if job is None:
        return 0
    try:
        is_stopped = rank(world, job, console)
    except (KeyboardInterrupt, SystemExit, Fault) as error:
        if world.rank == 0 and (status := _ended(error, job, console)) is not None:
            return status
        raise
    if is_stopped and world.rank == 0:
        return stopped(job.folder, console, job.verb, is_of_torchrun=True)
    return STOPPED if is_stopped else 0


def _ended(error: BaseException, job: TrainJob, console: Console) -> int | None:
    return ended(error, job.folder, console, job.verb, is_of_torchrun=True)


def rank(world: World, job: TrainJob, console: Console) -> bool:
    """One rank, from assembly to the last step; whether it was asked to stop before that, and has.

    Raises:
        Fault: torch raised what it raises wherever something breaks below it: memory, a connection, a kernel.
    """
    try:
        with listening(world.stop), sharing(job.folder):
            return _train(world, job, console)
    except RuntimeError as error:
        raise Fault(str(error).partition("\n")[0], rank=world.rank) from error


def _train(world: World, job: TrainJob, console: Console) -> bool:
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
            sink = ToldBeside(world.heart, _sink(job, stack, peak, trackers, console))
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


def _sink(job: TrainJob, stack: ExitStack, peak: float | None, trackers: dict[str, Tracker], console: Console) -> Sink:
    observe = job.run.config.observe
    against = "no peak is known" if peak is None else f"peak {peak / 1e9:,.0f} GFLOP/s a rank"
    convention = f"{MFU_CONVENTION if job.run.config.lora is None else lora.CONVENTION}; {against}"
    display = stack.enter_context(console.open_display(mfu_convention=convention, log_every=observe.log_every))
    opened = Fanout(sinks(observe, job.folder, display, trackers, console.warn))
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
