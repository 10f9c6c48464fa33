"""A run as lines of a log."""

from __future__ import annotations

from superstep.cli.train.progress import Progress
from superstep.cli.train.progress_words import (
    comparison_lines,
    data_share,
    is_resident,
    mfu_text,
    router_words,
    run_notes,
    run_text,
    unit_of_counts,
    validation_words,
)
from superstep.cli.train.rollback_text import setback
from superstep.observe.events import (
    Corrupted,
    Evaluated,
    Event,
    Fingerprinted,
    Goodput,
    LossDetails,
    Resumed,
    Retried,
    RolledBack,
    RolloutStats,
    RouterStats,
    RunFinished,
    RunStarted,
    RunStopped,
    Saved,
    StepDone,
    Warned,
)
from superstep.observe.number_format import bytes_text, count_text, duration_text, seconds_text


def lines(event: Event, progress: Progress, now: float) -> list[str]:
    """The lines of an event in a log; ``progress`` already includes it."""
    match event:
        case RunStarted():
            return [f"{event.run}: {run_text(event)}, {event.steps} steps", *run_notes(progress)]
        case Resumed() | RolledBack() | Corrupted():
            return setback(event)
        case Fingerprinted() | Goodput():
            return []
        case StepDone():
            parts = [
                f"loss {event.loss:.4f}",
                f"lr {event.lr:.2e}",
                f"grad norm {event.grad_norm:<5.3g}",
                f"{count_text(event.tokens_per_s):>5} {event.counts}/s",
                f"MFU {mfu_text(event)}",
                f"data wait {data_share(event):.1%}",
                f"{'process ' if is_resident(progress) else ''}{bytes_text(event.memory_bytes)}",
                f"elapsed {duration_text(event.elapsed_s)}",
            ]
            if (left_s := progress.left_s(now)) is not None:
                parts.append(f"left {duration_text(left_s)}")
        case LossDetails() | RolloutStats() | Retried():
            parts = _of_tuning(event)
        case RouterStats():
            parts = ["routers", *router_words(event)]
        case Evaluated():
            parts = [f"validation loss {event.loss:.4f}", *validation_words(progress)]
            parts.append(f"took {seconds_text(event.seconds)}")
        case Saved() | Warned():
            parts = _of_disk(event)
        case RunFinished():
            total = f"{count_text(event.tokens_seen)} {unit_of_counts(progress)} seen"
            summary = f"finished step {event.step} in {duration_text(event.elapsed_s)}, {total}"
            return [summary, *comparison_lines(progress)]
        case RunStopped():
            return [f"stopped after step {event.step} of {progress.steps}, on request"]
    return ["  ".join([_place(event.step, progress), *parts])]


def _place(step: int, progress: Progress) -> str:
    digits = len(str(progress.steps))
    return f"step {step:>{digits}}/{progress.steps}" if progress.steps else f"step {step}"


def _of_disk(event: Saved | Warned) -> list[str]:
    match event:
        case Saved():
            return [f"saved {event.path}", bytes_text(event.bytes), f"took {seconds_text(event.seconds)}"]
        case Warned():
            return [f"warning: {event.text}"]


def _of_tuning(event: LossDetails | RolloutStats | Retried) -> list[str]:
    match event:
        case LossDetails():
            return _measure_words(event)
        case RolloutStats():
            return _rollout_words(event)
        case Retried():
            return [f"graded again: {event.why}"]


def _measure_words(details: LossDetails) -> list[str]:
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in zip(details.names, details.values, strict=True)]


SMALLEST_KL = 1e-6
"""Nats; less is the rounding between two equivalent computations."""


def _rollout_words(rolled: RolloutStats) -> list[str]:
    """Results of a step of reinforcement learning, with unusual ones only if they occur."""
    words = [f"reward {rolled.reward:.4f}", f"{rolled.answers} answers"]
    counts = ((rolled.cut, "cut off"), (rolled.lost, "without a grade"), (rolled.uniform, "groups all alike"))
    words += [f"{count} {what}" for count, what in counts if count]
    words += [f"lag {rolled.lag}"] if rolled.lag else []
    far = {name: rolled.measures.get(name, 0.0) for name in ("old_k3", "sampler_k3")}
    words += [f"{name} {value:.2g}" for name, value in far.items() if abs(value) >= SMALLEST_KL]
    clipped = sum(rolled.measures.get(name, 0.0) for name in ("clip_low", "clip_high"))
    words += [f"clipped {clipped:.1%}"] if clipped else []
    return [*words, f"{count_text(rolled.drawn_tokens / max(rolled.seconds, 1e-9))} drawn/s"]
