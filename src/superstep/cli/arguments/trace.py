"""Arguments of superstep trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.flags.options import Parser
from superstep.errors import ConfigError

DESCRIPTION = (
    "Write the times of each instruction in the last steps of a run that trains now or has failed. RUN/steps.json has "
    "all ranks, for Perfetto; RUN/trace.json has the newest complete step, for superstep view. The ranks always "
    "record their last instructions; they are not disturbed."
)


def read(argv: Sequence[str]) -> tuple[Path, argparse.Namespace]:
    """The run, and the options.

    Raises:
        ConfigError: an option is wrong.
        SystemExit: after printing help.
    """
    parser = Parser(
        prog="superstep trace", usage="superstep trace RUN [--FLAG]", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="the folder of a run")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="the number of last steps; 8 by default")
    parser.add_argument("--out", metavar="FILE", help="write the steps to this file instead")
    options = parser.parse_args(list(argv))
    if options.run is None:
        raise ConfigError("no run is given; name its folder: superstep trace runs/demo.")
    if options.steps < 1:
        raise ConfigError(f"--steps = {options.steps} must be at least 1.")
    return Path(options.run), options
