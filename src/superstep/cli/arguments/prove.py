"""What superstep prove is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superstep.cli.options import COMMON, DEMO, read_flags, read_run, sections_of
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig

DESCRIPTION = "Run a layout and a one-process fp32 reference on the same batches, and compare every tensor."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RunConfig):
    """What to prove: a run, and how much of it."""

    all: bool = False
    """Sweep every layout that fits the world, tied and untied, packed and padded."""
    world: int | None = None
    """Ranks of the sweep; none takes the plan's."""
    steps: int = 2
    """Steps to compare."""
    exact: bool = False
    """Compare bits: exact mode on this layout against exact mode on one rank, with a restart between layouts."""
    faults: bool = False
    """Compare bits: a run whose ranks are killed, stopped and hung, whose launcher is killed, whose newest checkpoint
    is damaged and whose disk is full, against the same run undisturbed, in exact mode."""
    serve: bool = False
    """Compare bits: a server of the run's newest checkpoint against training, in exact mode."""
    serve_tp: int = 1
    """Ranks of that server."""
    serve_logprobs: int | None = None
    """The fewest log-probabilities of it to compare, all ways together; none takes what `steps` batches have."""


def read(argv: Sequence[str]) -> tuple[Options, tuple[str, ...] | None]:
    """The run and how much of it; and the flags, where they change settings that the user has not written himself.

    Raises:
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: help was asked for, and has been given.
    """
    path = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    flags = argv if path is None else argv[1:]
    base = DEMO if path is None else read_run(path / "run.toml" if path.is_dir() else path)
    options = read_flags(
        Options(**sections_of(base)),
        flags,
        prog="superstep prove [run.toml | RUN]",
        description=DESCRIPTION,
        common=COMMON,
    )
    for name, value in (
        ("steps", options.steps),
        ("world", options.world),
        ("serve-tp", options.serve_tp),
        ("serve-logprobs", options.serve_logprobs),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} = {value} must be at least 1.")
    if options.serve and (path is None or not path.is_dir()):
        raise ConfigError(
            "--serve needs a run that has a checkpoint; name its folder: superstep prove runs/demo --serve."
        )
    if options.serve and options.all:
        raise ConfigError("--serve and --all exclude each other: a run was trained on one layout; leave --all out.")
    if options.exact and not (options.serve or options.faults) and options.steps < 2:
        raise ConfigError("--steps = 1 leaves none after a restart; --exact needs at least 2.")
    if options.faults and (options.all or options.serve):
        raise ConfigError("--faults hurts one run; leave --all and --serve out.")
    return options, tuple(flags) if path is None or path.is_dir() else None
