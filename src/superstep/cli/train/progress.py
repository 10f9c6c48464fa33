"""State of a run from its events, and its text: lines for a log, a frame for a terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from superstep.cli.train.downsample import Curve
from superstep.cli.train.rollback_text import headway, setback
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
from superstep.observe.number_format import bytes_text, count_text, duration_text, seconds_text, sparkline
from superstep.observe.router_balance import busiest, share_dropped

WIDEST = 100
"""Columns of the widest frame; longer lines of numbers are hard to read."""

MARGIN = 2
"""Columns left free on either side of a frame."""

Fact = tuple[str, str]
"""A label and its number."""


class Progress:
    """The events so far, reduced to the latest of each kind and the course of the loss."""

    def __init__(self, *, mfu_convention: str) -> None:
        """``mfu_convention`` says in a few words what the MFU counts."""
        self.mfu_convention = mfu_convention
        self.started: RunStarted | None = None
        self.step: StepDone | None = None
        self.routers: RouterStats | None = None
        self.rolled: RolloutStats | None = None
        self.retried: Retried | None = None
        self.evaluated: Evaluated | None = None
        self.saved: Saved | None = None
        self.warned: Warned | None = None
        self.goodput: Goodput | None = None
        self.finished: RunFinished | None = None
        self.stopped: RunStopped | None = None
        self.losses = Curve()
        self._arrived_s = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=100)

    def add(self, event: Event, now: float) -> None:
        """Add an event that arrived at ``now``, in seconds of any monotonic clock."""
        match event:
            case RunStarted():
                self.started, self._arrived_s = event, now
            case StepDone():
                self.step, self._arrived_s = event, now
                self.losses.add(event.loss)
                self._recent.append((event.step, event.elapsed_s))
            case RouterStats():
                self.routers = event
            case RolloutStats():
                self.rolled = event
            case Retried():
                self.retried = event
            case Evaluated():
                self.evaluated = event
            case Saved() | Warned():
                self._add_of_disk(event)
            case RunFinished():
                self.finished = event
            case RunStopped():
                self.stopped = event
            case RolledBack():
                self._recent.clear()
            case Goodput():
                self.goodput = event
            case _:
                pass

    def _add_of_disk(self, event: Saved | Warned) -> None:
        match event:
            case Saved():
                self.saved = event
            case Warned():
                self.warned = event

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 before it has started."""
        return self.started.steps if self.started else 0

    def elapsed_s(self, now: float) -> float:
        """Seconds of training; the clock goes on between two steps."""
        if ended := self.finished or self.stopped:
            return ended.elapsed_s
        if not self.started and not self.step:
            return 0.0
        return (self.step.elapsed_s if self.step else 0.0) + now - self._arrived_s

    def left_s(self, now: float) -> float | None:
        """Seconds to the last step, at the pace of the last hundred steps with everything in between."""
        if self.finished:
            return 0.0
        if len(self._recent) < 2:
            return None
        (first, began_s), (last, ended_s) = self._recent[0], self._recent[-1]
        pace_s = (ended_s - began_s) / (last - first)
        return max(0.0, (self.steps - last) * pace_s - (now - self._arrived_s))


# A log: lines of text.


def lines(event: Event, progress: Progress, now: float) -> list[str]:
    """The lines of an event in a log; ``progress`` already includes it."""
    match event:
        case RunStarted():
            return [f"{event.run}: {_description(event)}, {event.steps} steps", *_notes(progress)]
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
                f"MFU {_mfu(event)}",
                f"data wait {_data_share(event):.1%}",
                f"{'process ' if _is_resident(progress) else ''}{bytes_text(event.memory_bytes)}",
                f"elapsed {duration_text(event.elapsed_s)}",
            ]
            if (left_s := progress.left_s(now)) is not None:
                parts.append(f"left {duration_text(left_s)}")
        case LossDetails() | RolloutStats() | Retried():
            parts = _of_tuning(event)
        case RouterStats():
            parts = ["routers", *_routers(event)]
        case Evaluated():
            parts = [f"validation loss {event.loss:.4f}", *_beside_validation(progress)]
            parts.append(f"took {seconds_text(event.seconds)}")
        case Saved() | Warned():
            parts = _of_disk(event)
        case RunFinished():
            total = f"{count_text(event.tokens_seen)} {_what_counts(progress)} seen"
            summary = f"finished step {event.step} in {duration_text(event.elapsed_s)}, {total}"
            return [summary, *_comparison_lines(progress)]
        case RunStopped():
            return [f"stopped after step {event.step} of {progress.steps}, on request"]
    return ["  ".join([_place(event.step, progress), *parts])]


def _place(step: int, progress: Progress) -> str:
    digits = len(str(progress.steps))
    return f"step {step:>{digits}}/{progress.steps}" if progress.steps else f"step {step}"


# A terminal: a frame of styled lines.
#
#     superstep  runs/demo
#     demo, pp 2, dp 2, 7.11M parameters, 4 ranks
#
#     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  299 / 600 steps
#
#     loss           3.3478   █▇▆▅▅▄▄▄▃▃▃▃▃▃▃▃▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▁▂▁▁▁▁▁▁▁▁▁
#     validation     3.5203   unigram entropy 6.8123   1.423 bits per byte
#
#     learning rate  1.50e-03      tokens/s        12.5k      elapsed         0:06
#     ...


def frame(progress: Progress, *, width: int, now: float, is_ascii: bool = False) -> list[Text]:
    """The run's state in styled lines, none wider than ``width`` columns."""
    inner = max(1, min(width, WIDEST) - 2 * MARGIN)
    body = [
        Text(),
        *_heading(progress),
        Text(),
        _bar(progress, inner, is_ascii=is_ascii),
        Text(),
        *_losses(progress, inner, is_ascii=is_ascii),
        Text(),
        *_side_by_side(_facts(progress, now), inner),
        Text(),
        *(Text(note, style="dim italic") for note in _notes(progress)),
    ]
    console = Console(width=inner)
    wrapped = [line for text in body for line in (text.wrap(console, inner) if text else [text])]
    for line in wrapped:
        line.rstrip()
        line.pad_left(MARGIN if line else 0)
        line.no_wrap = True
    return wrapped


def _heading(progress: Progress) -> list[Text]:
    run = progress.started
    if run is None:
        return [Text("superstep", style="bold")]
    return [Text.assemble(("superstep", "bold"), "  ", run.run), Text(_description(run), style="dim")]


def _bar(progress: Progress, width: int, *, is_ascii: bool) -> Text:
    done, steps = (progress.step.step if progress.step else 0), progress.steps
    figures = f"{done:>{len(str(steps))}} / {steps} steps" if steps else "starting"
    room = max(0, width - len(figures) - 2)
    filled = room * min(done, steps) // steps if steps else 0
    full, empty = ("#", "-") if is_ascii else ("━", "─")
    return Text.assemble(
        (full * filled, "green" if progress.finished else "cyan"),
        (empty * (room - filled), "bright_black"),
        "  ",
        figures,
    )


def _losses(progress: Progress, width: int, *, is_ascii: bool) -> list[Text]:
    step, evaluated = progress.step, progress.evaluated
    loss = Text.assemble((f"{'loss':<12}", "dim"), _figure(step.loss if step else None), " " * 3)
    curve = sparkline(progress.losses.resample(max(0, width - loss.cell_len)), is_ascii=is_ascii)
    validation = Text.assemble((f"{'validation':<12}", "dim"), _figure(evaluated.loss if evaluated else None))
    notes = "".join(f"   {note}" for note in _beside_validation(progress))
    shown = [loss.append(curve, style="cyan"), validation.append(notes, style="dim")]
    if progress.routers is None:
        return shown
    return [*shown, Text.assemble((f"{'routers':<12}", "dim"), "   ".join(_routers(progress.routers)))]


def _figure(loss: float | None) -> tuple[str, str]:
    """A loss on nine columns; one that is not finite is a warning."""
    if loss is None:
        return f"{'-':>9}", "dim"
    return f"{loss:>9.4f}", "bold" if math.isfinite(loss) else "bold red"


def _facts(progress: Progress, now: float) -> list[list[Fact]]:
    """Three groups of four: the optimisation, the machine, the run."""
    step, evaluated, saved, left_s = progress.step, progress.evaluated, progress.saved, progress.left_s(now)
    return [
        [
            ("learning rate", f"{step.lr:.2e}" if step else "-"),
            ("gradient norm", f"{step.grad_norm:.3g}" if step else "-"),
            ("step time", seconds_text(step.step_s) if step else "-"),
            ("data wait", f"{_data_share(step):.1%}" if step else "-"),
        ],
        [
            (f"{_what_counts(progress)}/s", count_text(step.tokens_per_s) if step else "-"),
            ("MFU", _mfu(step) if step else "-"),
            ("process" if _is_resident(progress) else "memory", bytes_text(step.memory_bytes) if step else "-"),
            (f"{_what_counts(progress)} seen", count_text(step.tokens_seen) if step else "-"),
        ],
        [
            ("elapsed", duration_text(progress.elapsed_s(now))),
            ("left", "-" if left_s is None else duration_text(left_s)),
            ("validated", f"step {evaluated.step}" if evaluated else "-"),
            ("saved", f"step {saved.step}" if saved else "-"),
        ],
    ]


def _side_by_side(groups: Sequence[Sequence[Fact]], width: int) -> Iterator[Text]:
    """The groups in columns that share the width, or below each other if they do not fit."""
    figure_columns, least_gap = 10, 3
    label_columns = [max(len(label) for label, _ in group) for group in groups]
    num_gaps = len(groups) - 1
    spare = width - sum(label_columns) - figure_columns * len(groups)
    if num_gaps and spare < least_gap * num_gaps:
        for group in groups:
            yield from _side_by_side([group], width)
        return
    gaps = [0] + [spare * (place + 1) // num_gaps - spare * place // num_gaps for place in range(num_gaps)]
    for row in zip(*groups, strict=True):
        text = Text()
        for (label, figure), columns, gap in zip(row, label_columns, gaps, strict=True):
            text.append(f"{'':<{gap}}{label:<{columns}}", style="dim")
            text.append(f"{figure:>{figure_columns}}")
        yield text


# Shared by both.


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


def _routers(stats: RouterStats) -> list[str]:
    """The busiest expert of all layers, and the dropped tokens."""
    loads = [busiest(row) for row in stats.chosen]
    dropped = share_dropped(sum(stats.chosen, ()), sum(stats.dropped, ()))
    return [f"busiest expert {max(loads):.2f}x the mean, in layer {loads.index(max(loads))}", f"dropped {dropped:.1%}"]


def _description(run: RunStarted) -> str:
    ranks = "1 rank" if run.world == 1 else f"{run.world} ranks" + (f" over {run.transport}" if run.transport else "")
    attention = f", attention {run.attention}" if run.attention else ""
    return f"{run.plan}, {count_text(run.parameters)} parameters, {ranks}{attention}"


def _notes(progress: Progress) -> list[str]:
    run = progress.started
    predicted = []
    if run and run.predicted_step_s is not None:
        predicted.append(f"{seconds_text(run.predicted_step_s)} a step")
    if run and run.predicted_memory_bytes is not None:
        predicted.append(f"{bytes_text(run.predicted_memory_bytes)} of tensors on the fullest rank")
    if run and run.snapshot_bytes:
        pinned = f", which cannot be pinned ({run.snapshots_unpinned})" if run.snapshots_unpinned else ""
        predicted.append(f"snapshots of up to {bytes_text(run.snapshot_bytes)} in its host's memory{pinned}")
    notes = _comparison_lines(progress) or ([f"predicted: {', '.join(predicted)}"] if predicted else [])
    if warned := progress.warned:
        notes.append(f"last warning, after step {warned.step}: {warned.text}")
    if again := progress.retried:
        notes.append(f"last repeated grade, after step {again.step}: {again.why}")
    layers = [f"layers: {run.layers}"] if run and run.layers else []
    return [*layers, *notes, f"MFU: {progress.mfu_convention}"]


def _comparison_lines(progress: Progress) -> list[str]:
    """Predicted and measured numbers, at the end of a run."""
    run, done = progress.started, progress.finished
    if run is None or done is None:
        return []
    parts = []
    if run.predicted_step_s is not None and done.step_s is not None:
        share = done.step_s / run.predicted_step_s - 1
        parts.append(f"{seconds_text(run.predicted_step_s)} a step, took {seconds_text(done.step_s)} ({share:+.0%})")
    if run.predicted_memory_bytes is not None and done.peak_bytes is not None:
        parts.append(
            f"{bytes_text(run.predicted_memory_bytes)} of tensors on the fullest rank, took "
            f"{bytes_text(done.peak_bytes)}"
        )
    lines_so_far = [f"predicted: {'; '.join(parts)}"] if parts else []
    return lines_so_far if progress.goodput is None else [*lines_so_far, headway(progress.goodput, run.predicted_ettr)]


def _beside_validation(progress: Progress) -> list[str]:
    """References of a validation loss."""
    notes = []
    if progress.started and progress.started.unigram_entropy is not None:
        notes.append(f"unigram entropy {progress.started.unigram_entropy:.4f}")
    if progress.evaluated and progress.evaluated.bits_per_byte is not None:
        notes.append(f"{progress.evaluated.bits_per_byte:.3f} bits per byte")
    if progress.evaluated and progress.evaluated.accuracy is not None:
        notes.append(f"accuracy {progress.evaluated.accuracy:.2%}")
    return notes


def _what_counts(progress: Progress) -> str:
    return progress.started.counts if progress.started else "tokens"


def _is_resident(progress: Progress) -> bool:
    """Whether memory is that of whole processes, which the prediction does not cover."""
    return progress.started is not None and progress.started.memory == "resident"


def _mfu(step: StepDone) -> str:
    return "-" if step.mfu is None else f"{step.mfu:.1%}"


def _data_share(step: StepDone) -> float:
    return step.data_s / step.step_s if step.step_s > 0 else 0.0
