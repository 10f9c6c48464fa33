"""Arguments of superstep tune merge."""

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
    """Options of a merge."""

    out: str = ""
    """The folder to make."""
    base: str = ""
    """The folder of the base weights, if they have moved since training."""


def read(argv: Sequence[str]) -> tuple[Path, MergeOptions]:
    """The run and the options.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    options = read_flags(MergeOptions(), argv[len(words) :], prog="superstep tune merge RUN", description=DESCRIPTION)
    if len(words) != 1 or not options.out:
        raise ConfigError("name a run and a folder to make: superstep tune merge runs/tuned --out merged.")
    return Path(words[0]), options
