"""The loop. What a step computes is the program's business; what is told of it, the sink's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from superstep.data.token_stream import Batch
from superstep.engine.flat.snapshots import Flushed
from superstep.errors import DiskFault
from superstep.monitor.status_page import beside
from superstep.observe.doctor.observations import CHECKPOINT, VALIDATION
from superstep.observe.events import (
    Evaluated,
    Event,
    Fingerprinted,
    LossTold,
    RouterSeen,
    RunFinished,
    RunStopped,
    Saved,
    Sink,
    StepDone,
    Warned,
)
from superstep.state.manifest import Position
from superstep.train.after_checkpoint import Written
from superstep.train.folder_watch import Displaced
from superstep.train.policy.corruption_check import ranks_text
from superstep.train.policy.rollback import go_back, tell, tell_refused
from superstep.train.policy.spike_detector import SkippedStep
from superstep.train.report_status import awaited
from superstep.train.save_schedule import attempt
from superstep.train.session import Session


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished step, where training stands after it, and whether it shall stop there, or be saved in the place of a
    snapshot that was damaged.
    """

    event: StepDone
    position: Position
    is_stop_asked: bool = False
    is_copy_refused: bool = False
    measures: Mapping[str, float] = field(default_factory=dict)


def train(session: Session, position: Position, sink: Sink) -> Position:
    """Train from ``position`` to the last step, or to the one that a rank is asked to stop in; validate and save on
    the way.
    """
    config = session.run.config
    last = config.train.steps
    for done in steps(session, position, told=sink.write):
        position = done.position
        is_stopped = done.is_stop_asked and position.step < last
        is_saved = is_stopped or done.is_copy_refused or session.is_saved(position.step)
        sink.write(done.event)
        if done.measures:
            told = done.measures
            sink.write(LossTold(step=position.step, names=tuple(told), values=tuple(told.values())))
        # Also where a run may be gone on with, so that no step is lost or counted twice.
        if session.has_routers and (is_saved or position.step % config.observe.log_every == 0):
            sink.write(routers(session, position))
        # Who is asked to stop may have seconds to save in.
        if not is_stopped and (position.step % config.train.eval_every == 0 or position.step == last):
            sink.write(evaluate(session, position))
        is_displaced = is_saved and session.follow_folder() is not None
        is_over = is_stopped or position.step == last or is_displaced
        if is_over:
            session.copies.drain()
        if is_over or done.is_copy_refused:
            tell_refused(session, position.step, sink.write)
        session.copies.tell(partial(_tell_flushed, session, sink.write, is_over=is_over))
        if is_saved and not is_over and session.want(position):
            _warn(session.write_trace(position.step), position, sink.write)
        elif is_saved:
            save(session, position, sink.write, is_last=is_over)
        if is_stopped:
            elapsed_s = session.meter.elapsed_s()
            sink.write(RunStopped(step=position.step, elapsed_s=elapsed_s, tokens_seen=position.tokens))
            return position
    sink.write(
        RunFinished(
            step=position.step,
            elapsed_s=session.meter.elapsed_s(),
            tokens_seen=position.tokens,
            step_s=session.meter.typical_step_s(),
            peak_bytes=session.meter.peak_bytes(),
        )
    )
    return position


def steps(
    session: Session,
    position: Position,
    seen: Callable[[Batch], None] | None = None,
    told: Callable[[Event], None] = lambda _: None,
) -> Generator[FinishedStep, None, None]:
    """One value for each step that is taken, until the last; after one that is not, the run goes on from before it.

    Args:
        session: what is driven.
        position: where training stands.
        seen: told what a rank reads before it is trained on.
        told: of each time that the run goes back.
    """
    last = session.run.config.train.steps
    session.integrity.begin(position.step)
    while position.step < last:
        for done in _stretch(session, position, session.course.next_gap(position.step, last), seen, told):
            found = done if isinstance(done, SkippedStep) else _checked(session, done, told)
            if isinstance(found, SkippedStep):
                position = go_back(session, position, found, told)
                break
            position = found.position
            yield found


def _checked(session: Session, done: FinishedStep, told: Callable[[Event], None]) -> FinishedStep | SkippedStep:
    """A step whose state is what was computed, as far as that is looked at; or what is wrong with it."""
    step = done.position.step
    is_saved = done.is_stop_asked or done.is_copy_refused or session.is_saved(step)
    if not session.integrity.is_due(step, is_saved=is_saved):
        return done
    if (earlier := session.integrity.resolved(step)) is not None:
        tell(session, earlier, "replay", step, told)
    prints, wrong = session.integrity.check(step)
    if wrong is not None:
        who = "differs on" if wrong.how is None else "is wrong on"
        why = f"{wrong.what} {who} {ranks_text(wrong.ranks)}"
        return SkippedStep(step, why, done.event.loss, done.event.grad_norm, wrong)
    weights, exp_avg, exp_avg_sq, gradients = prints.values()
    told(Fingerprinted(step=step, weights=weights, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, gradients=gradients))
    return done


def _stretch(
    session: Session,
    position: Position,
    last: int,
    seen: Callable[[Batch], None] | None,
    told: Callable[[Event], None],
) -> Generator[FinishedStep | SkippedStep, None, None]:
    """The steps between two places where data is left out, or to the first that is not taken."""
    size = session.run.config.train.batch_sequences
    cursor = position.samples + size * session.course.left_out_after(position.step)
    with session.batches(cursor, last - position.step) as batches:
        for batch, data_s in awaited(session.heart, batches):
            if seen is not None:
                seen(batch)
            start_s = time.perf_counter() - data_s
            lr = session.learning_rate(position.step)
            session.copies.begin(position, partial(_tell_flushed, session, told))
            session.look_at_folder()
            result = session.step(batch, lr, step=position.step + 1, sample=cursor)
            if result.refused:
                found = session.integrity.take()
                yield SkippedStep(position.step + 1, result.refused, result.loss, result.grad_norm, found)
                return
            cursor += size
            position = Position(step=position.step + 1, samples=cursor, tokens=position.tokens + result.tokens)
            session.require_finite(result, position.step)
            session.course.took(position.step, result.loss, result.grad_norm)
            step_s = time.perf_counter() - start_s
            session.meter.took(step_s)
            tokens_per_s = result.tokens / step_s
            event = StepDone(
                step=position.step,
                loss=result.loss,
                lr=lr,
                grad_norm=result.grad_norm,
                tokens=result.tokens,
                tokens_per_s=tokens_per_s,
                step_s=step_s,
                data_s=data_s,
                mfu=session.meter.mfu(tokens_per_s),
                memory_bytes=session.meter.memory_bytes(),
                elapsed_s=session.meter.elapsed_s(),
                tokens_seen=position.tokens,
            )
            yield FinishedStep(event, position, result.is_stop_asked, result.is_copy_refused, result.measures)


def routers(session: Session, position: Position) -> RouterSeen:
    """What the routers did since they were last reported."""
    routed = session.routed()
    return RouterSeen(
        step=position.step,
        steps=routed.steps,
        chosen=routed.chosen,
        dropped=routed.dropped,
        balance=routed.balance,
        z=routed.z,
    )


def evaluate(session: Session, position: Position) -> Evaluated:
    """The loss on the held-out text."""
    start_s = time.perf_counter()
    with beside(session.heart, VALIDATION):
        loss = session.validation_loss()
    bits = loss / math.log(2) / session.bytes_per_token
    return Evaluated(step=position.step, loss=loss, bits_per_byte=bits, seconds=time.perf_counter() - start_s)


def save(session: Session, position: Position, told: Callable[[Event], None], *, is_last: bool) -> None:
    """Write a checkpoint of where training stands; where the disk does not take it, have one due again soon.

    Raises:
        Fault: the run directory was moved or removed; the state is saved where it is now, or beside.
        DiskFault: the disk does not take it, and the run cannot go on without.
    """
    start_s = time.perf_counter()

    def write() -> tuple[Written, Displaced | None]:
        displaced = session.follow_folder()  # at each try: it may be moved between two
        return session.save(position), displaced

    with beside(session.heart, CHECKPOINT):
        found = attempt(
            session.saves,
            position.step,
            write,
            told,
            is_last=is_last,
            step_s=lambda: session.peers.gather(session.meter.typical_step_s())[0],
        )
    if found is None:
        return
    written, displaced = found
    seconds = time.perf_counter() - start_s
    told(Saved(step=position.step, path=str(written.path), seconds=seconds, bytes=written.bytes))
    _warn(written.problems, position, told)
    if displaced is not None:
        raise displaced.fault(position.step)


def _tell_flushed(session: Session, told: Callable[[Event], None], flushed: Flushed, *, is_over: bool = False) -> None:
    """Tell of a checkpoint that was, or could not be, written from a snapshot; a run that is over has one to come.

    Raises:
        DiskFault: it could not, and the newest checkpoint is too old to go on.
    """
    if flushed.is_on_disk:
        session.saves.note_saved(flushed.step)
        if (path := session.flushed_to(flushed.step)) is None:
            told(Warned(step=flushed.step, text="its checkpoint was written, and is not there any more."))
        else:
            told(Saved(step=flushed.step, path=str(path), seconds=flushed.seconds, bytes=flushed.bytes))
    elif not is_over and session.saves.is_too_old(flushed.step):
        raise DiskFault(flushed.problems, step=flushed.step)
    if flushed.problems:
        told(Warned(step=flushed.step, text=flushed.problems))


def _warn(problems: Sequence[str], position: Position, told: Callable[[Event], None]) -> None:
    for problem in problems:
        told(Warned(step=position.step, text=problem))
