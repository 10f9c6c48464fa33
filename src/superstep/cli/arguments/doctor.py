"""Arguments of superstep doctor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.flags.options import Parser
from superstep.errors import ConfigError

DESCRIPTION = (
    "Say what is wrong with a run that trains now, or with one that has failed: which rank hangs, in which instruction "
    "and why, who waits for whom, where the time goes, who is slower than its peers, whose memory grows, whether the "
    "disk has room. Exit status 0 where nothing is wrong, 1 where something is. Looking disturbs no rank."
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
    parser.add_argument("--json", action="store_true", help="print all of it as JSON instead")
    parser.add_argument("--stacks", action="store_true", help="print the whole stack of every thread of a live run")
    parser.add_argument("--page", action="store_true", help="write doctor.html into the folder too, with a graph")
    parser.add_argument("--open", action="store_true", help="likewise, and open it in the browser")
    options = parser.parse_args(list(argv))
    if options.run is None:
        raise ConfigError("name the folder of a run: superstep doctor runs/demo.")
    return Path(options.run), options
