"""Arguments of superstep doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superstep.cli.flags.options import read_name

DESCRIPTION = (
    "Diagnose a run that trains now, or one that has failed: which rank hangs, in which instruction and why, which "
    "rank waits for which, where the time goes, which ranks are slower than their peers, in which ranks the memory "
    "grows, and whether the disk has room. The exit status is 0 if nothing is wrong and 1 if something is. No rank is "
    "disturbed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of the diagnosis."""

    json: bool = False
    """Print everything as JSON instead."""
    stacks: bool = False
    """Print the complete stack of every thread of a live run."""
    page: bool = False
    """Also write doctor.html with a graph into the run directory."""
    open: bool = False
    """Write doctor.html and open it in the browser."""


def read(argv: Sequence[str]) -> tuple[Path, DoctorOptions]:
    """The folder of the run, and the options.

    Raises:
        ConfigError: no run is named, or an option is wrong.
        SystemExit: after printing help.
    """
    missing = "no run is given; name its folder: superstep doctor runs/demo."
    run, options = read_name(DoctorOptions(), argv, missing, prog="superstep doctor RUN", description=DESCRIPTION)
    return Path(run), options
