"""Arguments of superstep view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from superstep.cli.flags.options import DEMO, Bounds, read_flags, sections_of
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig

DESCRIPTION = (
    "Draw a training step. For a run.toml, WHAT is the predicted step on this machine; for the folder of a run, it is "
    "the recorded step; by default, it is the demo. For a run of tune rl, draw its rollouts, grades and steps on one "
    "timeline. For the file that a server wrote with --serve.replay, draw its steps over time. In addition to the "
    "text, a step is written as a page that plays it: step.html in the folder of a run, or WHAT.step.html for a "
    "run.toml. The page needs no network."
)

ENDS = (".html", ".svg", ".json")
"""Formats of a written step."""

FORMS = ("text", "program", "memory", "kernels", "router")
"""Flags of what is printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions(RunConfig):
    """A plan, and how its step is drawn."""

    text: bool = False
    """Draw the step only as text, and write no page."""
    program: bool = False
    """Print the instructions of each pipeline rank."""
    memory: bool = False
    """Also draw the memory of each pipeline rank over the step."""
    kernels: bool = False
    """Print the kernel of each layer, and the reason."""
    router: bool = False
    """For a run with experts: draw where tokens went in training."""
    layer: int | None = None
    """With --router: draw only this layer, counted from 0."""
    out: str | None = None
    """Write this file: a page (.html), a drawing (.svg) or a trace for Perfetto (.json)."""
    open: bool = False
    """Open the page in the browser."""
    width: Annotated[int | None, Bounds(least=1)] = None
    """Columns of the drawing; none uses those of the terminal."""

    @property
    def run(self) -> RunConfig:
        """The plan alone."""
        return RunConfig(**sections_of(self))


COMMON = (*FORMS, "layer", "out", "open", "width")


def read(argv: Sequence[str], base: RunConfig = DEMO) -> tuple[str | None, ViewOptions, Sequence[str]]:
    """The target; the options, with the plan of ``base`` as the flags change it; and the flags.

    Raises:
        ConfigError: an option is wrong.
        SystemExit: after printing help.
    """
    target = argv[0] if argv and not argv[0].startswith("-") else None
    flags = argv[1:] if target else argv
    options = read_flags(
        ViewOptions(**sections_of(base)), flags, prog="superstep view [WHAT]", description=DESCRIPTION, common=COMMON
    )
    forms = [name for name in FORMS if getattr(options, name)]
    if len(forms) > 1:
        raise ConfigError(f"--{forms[0]} and --{forms[1]} exclude each other; leave one of them out.")
    if forms and (options.out is not None or options.open):
        raise ConfigError(
            f"--{forms[0]} prints and writes no file; leave out --{forms[0]}, or leave out --out and --open."
        )
    if options.out is not None and Path(options.out).suffix not in ENDS:
        raise ConfigError(f"--out = '{options.out}' must end in one of {', '.join(ENDS)}.")
    return target, options, flags
