"""A verb's command line: an optional run.toml, then any field of RunConfig as a flag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tyro

from superstep.plan.config import PlanConfig, RunConfig, StateConfig
from superstep.plan.toml import read_config

DEMO = RunConfig(plan=PlanConfig(dp=2, zero=2, microbatch=4), state=StateConfig(dir="runs/demo"))
"""Two ranks, each with half of the gradients and of the optimizer."""


def parse(verb: str, argv: Sequence[str], *, description: str) -> tuple[RunConfig, bool]:
    """The run that a command line asks for, and whether it named a file.

    Raises:
        ConfigError: the file cannot be used.
        SystemExit: with status 2, where a flag is wrong; with 0, where help was asked for.
    """
    has_file = bool(argv) and not argv[0].startswith("-")
    base = read_config(Path(argv[0])) if has_file else DEMO
    return flags(verb, base, argv[1:] if has_file else argv, description=description), has_file


def flags(verb: str, base: RunConfig, argv: Sequence[str], *, description: str) -> RunConfig:
    """``base`` with the fields that flags name replaced."""
    return tyro.cli(
        RunConfig,
        default=base,
        args=list(argv),
        prog=f"superstep {verb} [run.toml]",
        description=description,
        config=(tyro.conf.FlagConversionOff,),
    )
