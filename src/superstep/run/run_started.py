"""The first event of a run: its plan, the implementations of its layers, and its prediction."""

from __future__ import annotations

import time

from superstep.cost.program.memory.snapshot_memory import snapshot_bytes
from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.cost.program.time.predict import predict
from superstep.cost.program.time.prediction_file import PredictedFrom, write_predicted_from
from superstep.data.sources.source import open_source, unigram_nats
from superstep.engine.attention.choose_attention import kernel_of
from superstep.launch.ranks import World
from superstep.observe.events import RunStarted
from superstep.plan.narrow import count_saved_bytes
from superstep.plan.optimizers import state_bytes
from superstep.planner.goodput import DISK_BYTES_PER_S, unhurt
from superstep.run.job import TrainJob
from superstep.run.reports.plan_line import plan_text
from superstep.run.reports.prediction import foretold
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.run_folder.run_paths import write_whole


def describe_start(
    job: TrainJob, world: World, trainer: CorpusTrainer, machine: MeasuredMachine | None, step: int
) -> RunStarted:
    """The first event of a launch, which continues after ``step``. The inputs of the prediction, if the machine was
    measured, are written into the run's folder.
    """
    prediction = None
    if machine is not None:
        given = PredictedFrom(is_weighed=job.sequence_loss is not None, plan=job.run.config.plan, machine=machine)
        write_whole(job.folder.prediction, write_predicted_from(given))
        prediction = predict(job.run, machine, job.operations, is_weighed=given.is_weighed)
    parts = foretold(job.run, job.operations, prediction)
    return RunStarted(
        run=str(job.folder.root),
        plan=plan_text(job.run),
        parameters=job.run.outline.numel,
        counts=job.run.counts,
        world=world.size,
        transport=trainer.transport,
        attention=kernel_of(job.run, world.device),
        layers=trainer.layers,
        steps=job.run.config.train.steps,
        unigram_entropy=unigram_nats(open_source(job.corpus)),
        predicted_step_s=prediction.step_s if prediction else None,
        predicted_ettr=None if prediction is None else _predict_ettr(job, step, prediction.step_s),
        predicted_memory_bytes=prediction.memory_bytes if prediction else None,
        predicted_spent_s=parts.spent_s,
        predicted_bytes=parts.bytes,
        predicted_traffic_bytes=parts.traffic_bytes,
        snapshot_bytes=snapshot_bytes(job.run),
        snapshots_unpinned=trainer.copies.unpinned,
        memory="resident" if world.device.kind == "cpu" else "allocated",
    )


def _predict_ettr(job: TrainJob, step: int, step_s: float) -> float:
    """The predicted share of this launch's time that makes progress from a step on, without failures."""
    config = job.run.config
    left = max(1, config.train.steps - step)
    # A forward pass is a third of a step's work; a snapshot is saved in the background, all but the last.
    validations_s = -(-left // config.train.eval_every) * config.train.eval_batches * step_s / 3
    is_flushed = config.state.snapshot_every is not None and job.epoch == 0
    saves = 1 if is_flushed else -(-left // config.state.save_every)
    saved = state_bytes(config.train.optimizer) * job.run.outline.numel - count_saved_bytes(config, job.run.outline)
    save_s = saved / DISK_BYTES_PER_S
    elapsed_s = time.time() - job.began_at_s
    return unhurt(elapsed_s=elapsed_s, steps_s=left * step_s, validations_s=validations_s, saves_s=saves * save_s)
