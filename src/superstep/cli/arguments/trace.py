"""Arguments of superstep trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from superstep.cli.flags.options import Bounds, read_name

DESCRIPTION = (
    "Write the times of each instruction in the last steps of a run that trains now or has failed. RUN/steps.json has "
    "all ranks, for Perfetto; RUN/trace.json has the newest complete step, for superstep view. The ranks always "
    "record their last instructions; they are not disturbed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of the traces."""

    steps: Annotated[int, Bounds(least=1)] = 8
    """The number of last steps."""
    out: str | None = None
    """Write the steps to this file instead."""


def read(argv: Sequence[str]) -> tuple[Path, TraceOptions]:
    """The folder of the run, and the options.

    Raises:
        ConfigError: no run is named, or an option is wrong.
        SystemExit: after printing help.
    """
    missing = "no run is given; name its folder: superstep trace runs/demo."
    run, options = read_name(TraceOptions(), argv, missing, prog="superstep trace RUN", description=DESCRIPTION)
    return Path(run), options
