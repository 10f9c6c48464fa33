"""The training loop: it drives the trainer step by step, and writes events to the sink."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial

from superstep.data.batch import Batch
from superstep.monitor.status_page import beside
from superstep.observe.doctor.observations import VALIDATION
from superstep.observe.events import (
    Evaluated,
    Event,
    LossDetails,
    RouterStats,
    RunFinished,
    RunStopped,
    Sink,
    StepDone,
    Warned,
)
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.policy.spike_detector import SkippedStep
from superstep.train.rollback import check_state, go_back, tell_refused
from superstep.train.run_folder.report_status import report_waits
from superstep.train.saving import report_flushed, save, warn


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished step.

    Attributes:
        event: its loss, norm and rate.
        position: of training after it.
        is_stop_requested: whether the run stops here.
        is_copy_refused: whether to save now, in place of a damaged snapshot.
        measures: details of the loss.
    """

    event: StepDone
    position: Position
    is_stop_requested: bool = False
    is_copy_refused: bool = False
    measures: Mapping[str, float] = field(default_factory=dict)


def train(trainer: CorpusTrainer, position: Position, sink: Sink) -> Position:
    """Train from ``position`` to the last step, or until a rank receives a stop signal; validate and save
    on the way.
    """
    config = trainer.run.config
    last = config.train.steps
    for done in steps(trainer, position, report=sink.write):
        position = done.position
        is_stopped = done.is_stop_requested and position.step < last
        is_saved = is_stopped or done.is_copy_refused or trainer.is_saved(position.step)
        sink.write(done.event)
        if done.measures:
            measures = done.measures
            sink.write(LossDetails(step=position.step, names=tuple(measures), values=tuple(measures.values())))
        # Also before a possible resume, so that no step is lost or counted twice.
        if trainer.has_routers and (is_saved or position.step % config.observe.log_every == 0):
            sink.write(routers(trainer, position))
        # A run with a stop signal may have only seconds left to save.
        if not is_stopped and (position.step % config.train.eval_every == 0 or position.step == last):
            sink.write(evaluate(trainer, position))
        is_displaced = is_saved and trainer.follow_folder() is not None
        is_over = is_stopped or position.step == last or is_displaced
        if is_over:
            trainer.copies.drain()
        if is_over or done.is_copy_refused:
            tell_refused(trainer, position.step, sink.write)
        trainer.copies.tell(partial(report_flushed, trainer, sink.write, is_over=is_over))
        if is_saved and not is_over and trainer.copies.want(position):
            warn(trainer.write_trace(position.step), position, sink.write)
        elif is_saved:
            save(trainer, position, sink.write, is_last=is_over)
        if is_stopped:
            elapsed_s = trainer.meter.elapsed_s()
            sink.write(RunStopped(step=position.step, elapsed_s=elapsed_s, tokens_seen=position.tokens))
            return position
    sink.write(
        RunFinished(
            step=position.step,
            elapsed_s=trainer.meter.elapsed_s(),
            tokens_seen=position.tokens,
            step_s=trainer.meter.typical_step_s(),
            peak_bytes=trainer.meter.peak_bytes(),
        )
    )
    return position


def steps(
    trainer: CorpusTrainer,
    position: Position,
    on_batch: Callable[[Batch], None] | None = None,
    report: Callable[[Event], None] = lambda _: None,
) -> Generator[FinishedStep, None, None]:
    """Run steps until the last one; after a rejected step, the run goes back and continues.

    Args:
        trainer: the trainer.
        position: where training starts.
        on_batch: called with each batch of this rank before it is trained on.
        report: called with the event of each rollback.
    """
    last = trainer.run.config.train.steps
    trainer.policy.integrity.begin(position.step)
    while position.step < last:
        for done in _stretch(trainer, position, trainer.policy.spikes.next_gap(position.step, last), on_batch, report):
            skipped = done if isinstance(done, SkippedStep) else _check(trainer, done, report)
            if skipped is not None:
                position, _ = go_back(trainer, position, skipped, report)
                break
            assert isinstance(done, FinishedStep)
            position = done.position
            yield done


def _check(trainer: CorpusTrainer, done: FinishedStep, report: Callable[[Event], None]) -> SkippedStep | None:
    """Check the state after a step; None if it is correct."""
    step, event = done.position.step, done.event
    is_saved = done.is_stop_requested or done.is_copy_refused or trainer.is_saved(step)
    return check_state(trainer, step, report, is_saved=is_saved, loss=event.loss, grad_norm=event.grad_norm)


def _stretch(
    trainer: CorpusTrainer,
    position: Position,
    last: int,
    on_batch: Callable[[Batch], None] | None,
    report: Callable[[Event], None],
) -> Generator[FinishedStep | SkippedStep, None, None]:
    """Steps up to the next gap in the data, or to the first rejected step."""
    size = trainer.run.config.train.batch_sequences
    cursor = position.samples + size * trainer.policy.spikes.batches_left_out_after(position.step)
    with trainer.batches(cursor, last - position.step) as batches:
        for batch, data_s in report_waits(trainer.heart, batches):
            if on_batch is not None:
                on_batch(batch)
            start_s = time.perf_counter() - data_s
            lr = trainer.learning_rate(position.step)
            trainer.copies.begin(position, partial(report_flushed, trainer, report))
            trainer.look_at_folder()
            result = trainer.step(batch, lr, step=position.step + 1, sample=cursor)
            if result.refused:
                yield trainer.policy.make_skipped(result, position.step + 1)
                return
            cursor += size
            position = trainer.advance(position, samples=cursor, tokens=result.tokens)
            if result.is_skipped:
                report(tell_skipped(position))
            else:
                trainer.require_finite(result, position.step)
                trainer.policy.spikes.took(position.step, result.loss, result.grad_norm)
            step_s = time.perf_counter() - start_s
            trainer.meter.took(step_s)
            tokens_per_s = result.tokens / step_s
            event = StepDone(
                step=position.step,
                loss=result.loss,
                lr=lr,
                grad_norm=result.grad_norm,
                tokens=result.tokens,
                counts=trainer.run.counts,
                tokens_per_s=tokens_per_s,
                step_s=step_s,
                data_s=data_s,
                mfu=trainer.meter.mfu(tokens_per_s),
                memory_bytes=trainer.meter.memory_bytes(),
                elapsed_s=trainer.meter.elapsed_s(),
                tokens_seen=position.tokens,
            )
            yield FinishedStep(event, position, result.is_stop_requested, result.is_copy_refused, result.measures)


def tell_skipped(position: Position) -> Warned:
    """The event of a step without an update."""
    assert position.loss_scale is not None, "only fp16 skips steps"
    scale = position.loss_scale.factor
    text = f"step {position.step} overflowed in fp16 and is skipped; the loss scale is now {scale:g}."
    return Warned(step=position.step, text=text)


def routers(trainer: CorpusTrainer, position: Position) -> RouterStats:
    """Router statistics since the last report."""
    routed = trainer.gather_routing()
    return RouterStats(
        step=position.step,
        steps=routed.steps,
        chosen=routed.chosen,
        dropped=routed.dropped,
        balance=routed.balance,
        z=routed.z,
    )


def evaluate(trainer: CorpusTrainer, position: Position) -> Evaluated:
    """The loss on the held-out data."""
    start_s = time.perf_counter()
    with beside(trainer.heart, VALIDATION):
        validation = trainer.validate()
    bytes_per_token = trainer.bytes_per_token
    bits = None if bytes_per_token is None else validation.loss / math.log(2) / bytes_per_token
    return Evaluated(
        step=position.step,
        loss=validation.loss,
        bits_per_byte=bits,
        accuracy=validation.accuracy,
        seconds=time.perf_counter() - start_s,
    )
