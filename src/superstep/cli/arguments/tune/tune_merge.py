"""What superstep tune merge is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from superstep.cli.flags.options import read_flags
from superstep.errors import ConfigError

DESCRIPTION = (
    "Merge an adapter into the weights that it adds to, as a folder that Hugging Face's loaders read. RUN is a run "
    "that trained one, a checkpoint of it, or a folder as PEFT writes it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Where from, and where to."""

    out: str = ""
    """The folder to make."""
    base: str = ""
    """The folder of the weights, where they are not where they were in training."""


def read(argv: Sequence[str]) -> tuple[Path, MergeOptions]:
    """The run and the rest.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: help was asked for, and has been given.
    """
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    options = read_flags(MergeOptions(), argv[len(words) :], prog="superstep tune merge RUN", description=DESCRIPTION)
    if len(words) != 1 or not options.out:
        raise ConfigError("name a run and a folder to make: superstep tune merge runs/tuned --out merged.")
    return Path(words[0]), options
