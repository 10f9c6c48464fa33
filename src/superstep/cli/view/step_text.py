"""A step as superstep view shows it: its title and its drawing as text, and the file beside."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from pathlib import Path

from superstep.cli.arguments.view import ViewOptions
from superstep.cli.view.step_page import StepView, page_path, write_page, write_svg, write_trace
from superstep.cost.program.time.op_prices import Prices
from superstep.cost.program.time.predict import Prediction
from superstep.errors import Fault
from superstep.observe.drawing.timeline import GUTTER, draw_text
from superstep.observe.number_format import bytes_text
from superstep.program.timeline import Timeline
from superstep.train.run_folder.run_paths import write_whole
from superstep.train.weights.model import operations, resolve_config


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Options of a drawing.

    Attributes:
        width: columns.
        has_colour: whether the output is a terminal with colours.
        is_plain: whether to use neither colours nor terminal signs: NO_COLOR, or a dumb terminal.
    """

    width: int
    has_colour: bool
    is_plain: bool


def title_of(prediction: Prediction, machine: Prices, *, when: str = "for this machine") -> str:
    """Rates of the machine that the prediction is for, and the memory of the fullest rank."""
    full = max(prediction.memory, key=lambda rank: rank.bytes)
    return (
        f"predicted {when}: {machine.gemm_flops_per_s / 1e9:.3g} GFLOP/s in products, "
        f"{machine.memory_bytes_per_s / 1e9:.3g} GB/s of memory, {machine.link_bytes_per_s / 1e9:.3g} GB/s between "
        f"ranks\nfullest rank {bytes_text(full.bytes)}: parameters {bytes_text(full.params)}, gradients "
        f"{bytes_text(full.gradients)}, optimizer {bytes_text(full.optimizer)}, within the step "
        f"{bytes_text(full.batch + full.peak.bytes)}"
    )


def draw(timeline: Timeline, picture: DrawOptions, scale_s: float) -> str:
    """The drawing; its width is the picture's share for the step in ``scale_s``."""
    columns = round((picture.width - GUTTER) * timeline.step_s / scale_s) if scale_s else picture.width
    return draw_text(timeline, GUTTER + columns, picture.has_colour)


def write_step(step: StepView, target: str | None, options: ViewOptions, about: str) -> None:
    """Write the step to a file, unless only text is wanted."""
    if options.text:
        return
    path = Path(options.out) if options.out else page_path(target)
    name = target or "the demo"
    match path.suffix:
        case ".svg":
            kind, text = "a drawing", write_svg(name, step)
        case ".json":
            kind, text = "a trace, for ui.perfetto.dev or chrome://tracing", write_trace(name, step)
        case _:
            kind = "a page that plays it"
            text = write_page(f"{name}: a step", about, step, resolve=resolve_config, rehearse=operations)
    try:
        write_whole(path, text, makes_folder=bool(options.out))
    except Fault:
        if options.out or options.open:
            raise
        # The text is enough if no file can be written.
        say(f"\nno page: {path} cannot be written; --out names another file\n")
        return
    say(f"\nthe step as {kind}: {path}\n")
    if options.open:
        webbrowser.open(path.resolve().as_uri())


def say(text: str) -> None:
    print(text, end="")
