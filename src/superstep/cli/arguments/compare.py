"""Arguments of superstep compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superstep.cli.flags.options import read_names
from superstep.errors import ConfigError

DESCRIPTION = (
    "Compare runs: list the settings that differ, say whether the losses differ by more than noise, and draw all "
    "curves on one page. Each run is compared with the first."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of the page."""

    out: str = "compare.html"
    """The page."""
    open: bool = False
    """Open the page in the browser."""


def read(argv: Sequence[str]) -> tuple[list[Path], CompareOptions]:
    """The folders of the runs, and the options.

    Raises:
        ConfigError: fewer than two runs, or an option is wrong.
        SystemExit: after printing help.
    """
    runs, options = read_names(CompareOptions(), argv, prog="superstep compare RUN...", description=DESCRIPTION)
    if len(runs) < 2:
        raise ConfigError("at least two runs are needed: superstep compare runs/demo runs/demo-2.")
    if Path(options.out).suffix != ".html":
        raise ConfigError(f"--out = '{options.out}' must end in .html.")
    return [Path(run) for run in runs], options
