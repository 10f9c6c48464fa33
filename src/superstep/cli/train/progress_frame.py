"""A run as a frame of styled lines in a terminal.

superstep  runs/demo
demo, pp 2, dp 2, 7.11M parameters, 4 ranks

━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  299 / 600 steps

loss           3.3478   █▇▆▅▅▄▄▄▃▃▃▃▃▃▃▃▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▁▂▁▁▁▁▁▁▁▁▁
validation     3.5203   unigram entropy 6.8123   1.423 bits per byte

learning rate  1.50e-03      tokens/s        12.5k      elapsed         0:06
...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from superstep.cli.train.progress import Progress
from superstep.cli.train.progress_words import (
    data_share,
    is_resident,
    mfu_text,
    router_words,
    run_notes,
    run_text,
    unit_of_counts,
    validation_words,
)
from superstep.observe.number_format import bytes_text, count_text, duration_text, seconds_text, sparkline

WIDEST = 100
"""Columns of the widest frame; longer lines of numbers are hard to read."""

MARGIN = 2
"""Columns left free on either side of a frame."""

Fact = tuple[str, str]
"""A label and its number."""


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
        *(Text(note, style="dim italic") for note in run_notes(progress)),
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
    return [Text.assemble(("superstep", "bold"), "  ", run.run), Text(run_text(run), style="dim")]


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
    notes = "".join(f"   {note}" for note in validation_words(progress))
    shown = [loss.append(curve, style="cyan"), validation.append(notes, style="dim")]
    if progress.routers is None:
        return shown
    return [*shown, Text.assemble((f"{'routers':<12}", "dim"), "   ".join(router_words(progress.routers)))]


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
            ("data wait", f"{data_share(step):.1%}" if step else "-"),
        ],
        [
            (f"{unit_of_counts(progress)}/s", count_text(step.tokens_per_s) if step else "-"),
            ("MFU", mfu_text(step) if step else "-"),
            ("process" if is_resident(progress) else "memory", bytes_text(step.memory_bytes) if step else "-"),
            (f"{unit_of_counts(progress)} seen", count_text(step.tokens_seen) if step else "-"),
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
