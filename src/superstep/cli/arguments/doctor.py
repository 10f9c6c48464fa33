"""Arguments of superstep doctor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.flags.options import Parser
from superstep.errors import ConfigError

DESCRIPTION = (
    "Diagnose a run that trains now, or one that has failed: which rank hangs, in which instruction and why, which "
    "rank waits for which, where the time goes, which ranks are slower than their peers, in which ranks the memory "
    "grows, and whether the disk has room. The exit status is 0 if nothing is wrong and 1 if something is. No rank is "
    "disturbed."
)


def read(argv: Sequence[str]) -> tuple[Path, argparse.Namespace]:
    """The run, and the options.

    Raises:
        ConfigError: no run is named.
        SystemExit: after printing help.
    """
    parser = Parser(
        prog="superstep doctor", usage="superstep doctor RUN [--FLAG]", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="the folder of a run")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.add_argument("--stacks", action="store_true", help="print the complete stack of every thread of a live run")
    parser.add_argument(
        "--page", action="store_true", help="also write doctor.html with a graph into the run directory"
    )
    parser.add_argument("--open", action="store_true", help="write doctor.html and open it in the browser")
    options = parser.parse_args(list(argv))
    if options.run is None:
        raise ConfigError("no run is given; name its folder: superstep doctor runs/demo.")
    return Path(options.run), options
