"""Arguments of superstep grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from superstep.cli.arguments.port import PORTS, PortOptions
from superstep.cli.flags.help import page
from superstep.cli.flags.options import Bounds, asks_for_help, read_name
from superstep.errors import ConfigError, did_you_mean
from superstep.grade.config import GradeConfig, check_config

DEEDS = {
    "serve": "Grade rollouts over HTTP: POST /grade, POST /grade/batch, GET /health, GET /metrics. FILE has the tasks.",
    "check": "Attack the grader of FILE before training does. The exit status is 1 if a wrong answer gets a score.",
}
COMMON = ("grade.sandbox", "grade.timeout_s", "grade.memory_bytes", "grade.workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeServeOptions(PortOptions):
    """Options of the server."""

    port: Annotated[int, PORTS] = 8100
    """The port to listen on; 0 takes a free one."""
    grade: GradeConfig = field(default_factory=GradeConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of the attacks."""

    tasks: Annotated[int, Bounds(least=1, most=1000)] = 8
    """The number of tasks on which each attack is tried, from index 0."""
    seed: int = 0
    """The seed of the tasks."""
    # An attack that hangs a grader takes all of its time: the evaluation of 10**10**10, for one.
    grade: GradeConfig = field(default_factory=lambda: GradeConfig(retries=0, grader_timeout_s=15.0))


def read(argv: Sequence[str]) -> tuple[Path, GradeServeOptions | CheckOptions]:
    """The environment's file, and the options of the action.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    words = [word for word in argv[:1] if not word.startswith("-")]
    if not words and asks_for_help(argv):
        print(_usage())
        raise SystemExit(0)
    verb = words[0] if words else ""
    if verb not in DEEDS:
        hint = did_you_mean(verb, DEEDS) if verb else "."
        raise ConfigError(
            f"superstep grade has no action '{verb}': write superstep grade serve FILE, or superstep grade check "
            f"FILE{hint}"
        )
    options = GradeServeOptions() if verb == "serve" else CheckOptions()
    missing = f"no file is given; name the file with the tasks: superstep grade {verb} tasks.py."
    file, options = read_name(
        options, argv[1:], missing, prog=f"superstep grade {verb} FILE", description=DEEDS[verb], common=COMMON
    )
    check_config(options.grade)
    return Path(file), options


def _usage() -> str:
    last = f"superstep grade {'|'.join(DEEDS)} --help lists the flags."
    return page(f"usage: superstep grade {'|'.join(DEEDS)} FILE [--FLAG VALUE ...]", DEEDS.items(), last)
