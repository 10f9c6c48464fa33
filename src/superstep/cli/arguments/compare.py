"""Arguments of superstep compare."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.flags.options import Parser
from superstep.errors import ConfigError

DESCRIPTION = (
    "Compare runs: list the settings that differ, say whether the losses differ by more than noise, and draw all "
    "curves on one page. Each run is compared with the first."
)


def read(argv: Sequence[str]) -> tuple[list[Path], argparse.Namespace]:
    """The runs, and the options.

    Raises:
        ConfigError: fewer than two runs, or an option is wrong.
        SystemExit: after printing help.
    """
    parser = Parser(
        prog="superstep compare", usage="superstep compare RUN... [--FLAG]", description=DESCRIPTION,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", default="compare.html", metavar="FILE", help="the page; compare.html by default")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    options = parser.parse_args(list(argv))
    if len(options.runs) < 2:
        raise ConfigError("at least two runs are needed: superstep compare runs/demo runs/demo-2.")
    if Path(options.out).suffix != ".html":
        raise ConfigError(f"--out = '{options.out}' must end in .html.")
    return [Path(run) for run in options.runs], options
