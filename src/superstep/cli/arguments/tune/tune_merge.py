"""Arguments of superstep tune merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from superstep.cli.flags.options import read_names
from superstep.errors import ConfigError

DESCRIPTION = (
    "Merge an adapter into its base weights and write a folder for Hugging Face's loaders. RUN is a run that trained "
    "an adapter, a checkpoint of such a run, or a folder in PEFT's format."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Options of a merge."""

    out: str = ""
    """The folder to create."""
    base: str = ""
    """The folder of the base weights, if they have moved since training."""
    onto: Literal["original", "quantized"] = "original"
    """Of an adapter that was trained beside a base in few bits: the weights it is added to, those of the folder, or as
    training had them."""


def read(argv: Sequence[str]) -> tuple[Path, MergeOptions]:
    """The run and the options.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    words, options = read_names(MergeOptions(), argv, prog="superstep tune merge RUN", description=DESCRIPTION)
    if len(words) != 1 or not options.out:
        raise ConfigError("a run and a folder to create are needed: superstep tune merge runs/tuned --out merged.")
    return Path(words[0]), options
