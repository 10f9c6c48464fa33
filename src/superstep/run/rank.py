"""The work of each rank of a run, from assembly to the last step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from superstep.comm.objects import gather
from superstep.engine.measure.probe_machine import measure_here
from superstep.errors import Fault
from superstep.launch.ranks import World
from superstep.launch.stop_request import listening
from superstep.observe.events import Fanout, Resumed, Sink, Warned
from superstep.observe.jsonl import damage
from superstep.run.console import Console
from superstep.run.job import TrainJob, watch_of
from superstep.run.memory_check import require_fit
from superstep.run.reports.prediction import peak_of
from superstep.run.run_events import open_sink
from superstep.run.run_started import describe_start
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import train
from superstep.train.resume import resume
from superstep.train.run_folder.run_lock import hold_shared
from superstep.train.throughput import PeakRate


def rank(world: World, job: TrainJob, console: Console) -> bool:
    """One rank, from assembly to the last step; whether it stopped early on request.

    Raises:
        Fault: an error of torch, such as memory, a connection, or a kernel.
    """
    try:
        with listening(world.stop), hold_shared(job.folder):
            return _train(world, job, console)
    except RuntimeError as error:
        raise Fault(str(error).partition("\n")[0], rank=world.rank) from error


def _train(world: World, job: TrainJob, console: Console) -> bool:
    if world.device.kind == "cuda":
        require_fit(job.run, world.device, job.operations)
    machine = None if job.operations is None else measure_here(job.run, job.operations, world)
    peak = peak_of(job.run, world.device, machine)
    rate = PeakRate(flops_per_token=job.flops_per_token, peak_flops=peak)
    trainer = CorpusTrainer(world, job.run, job.folder, job.corpus, rate, sequence_loss=job.sequence_loss)
    position, resumed = _restore_position(trainer, world, job)
    trainer.recall(position)
    predicted_step_s = None
    with ExitStack() as stack:
        sink: Sink = Fanout(())
        if world.rank == 0:
            had_begun = job.folder.metrics.exists()
            sink = open_sink(job, stack, world, peak, console)
            trainer.describe()
            trainer.watch = stack.enter_context(watch_of(job))
            started = describe_start(job, world, trainer, machine, position.step)
            predicted_step_s = started.predicted_step_s
            sink.write(started)
            if resumed is not None:
                sink.write(resumed)
            elif had_begun:
                sink.write(Resumed(step=position.step, path=""))
            if text := damage(job.folder.metrics):
                sink.write(Warned(step=position.step, text=text))
        # Before the first step, hang detection uses a multiple of the predicted time.
        world.heart.expect(gather(predicted_step_s, float | None)[0] or 0.0)
        position = train(trainer, position, sink)
    # Not after a failure: then the process ends, and waiting for lost ranks would hide the reason.
    trainer.close()
    return position.step < job.run.config.train.steps


def _restore_position(trainer: CorpusTrainer, world: World, job: TrainJob) -> tuple[Position, Resumed | None]:
    """The position of training: at the start, after the newest checkpoint, or after a snapshot; and a resume event."""
    memory = None if job.snapshots is None else job.snapshots.of(world.rank)
    lost = job.recovered
    step = None if lost is None else lost.step
    # Snapshots have no frozen weights, and no reference of a loss.
    is_all_there = "frozen" not in job.run.plan.families and job.sequence_loss is None
    start = None
    position = Position()
    if step is None or not is_all_there:
        start = None if job.checkpoint is None else resume(trainer, job.checkpoint.parent)
        position = trainer.start() if start is None else start.position
    if memory is not None:
        position = trainer.keep_snapshots(memory, step, epoch=job.epoch) or position
    resumed = Resumed(step=position.step, path="")
    if lost is not None:
        resumed = replace(resumed, joined=lost.lost) if lost.is_gain else replace(resumed, lost=lost.lost)
        resumed = replace(resumed, lost_at_s=lost.lost_at_s, passed_over=lost.passed_over)
    if start is None or step is not None:
        return position, None if lost is None else resumed
    passed_over = start.set_damaged_aside() if world.rank == 0 else ()
    return position, replace(resumed, path=str(start.path), passed_over=resumed.passed_over + passed_over)
