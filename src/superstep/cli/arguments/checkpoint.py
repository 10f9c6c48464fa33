"""Arguments of superstep checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal, get_args

from superstep.cli.flags.help import page
from superstep.cli.flags.options import Bounds, asks_for_help, read_flags
from superstep.errors import ConfigError, UserError, did_you_mean

Word = Literal["list", "verify", "export"]

WORDS: Mapping[Word, str] = {
    "list": "list the checkpoints of a run with their manifests and sizes",
    "verify": "read every byte of a run's checkpoints, or of one; exit status 1 if one is damaged",
    "export": "write the weights of a checkpoint, or of a run's newest, as a folder for Hugging Face's loaders",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of an export."""

    out: str = ""
    """The folder to create."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights: as in training, or rounded to the nearest bf16."""
    shard_gib: Annotated[float, Bounds(above=0)] = 4.0
    """The largest size of a file; larger weights are split into several, with an index."""


@dataclass(frozen=True, slots=True)
class CheckpointArgs:
    """The action and its options."""

    word: Word
    name: str
    """A run or a checkpoint, or the URL of a store."""
    options: CopyOptions

    @property
    def path(self) -> Path:
        """Its path, if it is not in a store."""
        return Path(self.name)


def _usage() -> str:
    usage = "usage: superstep checkpoint list|verify|export RUN [--FLAG VALUE ...]"
    return page(usage, WORDS.items(), "RUN is a run's directory, one of its checkpoints, or the URL of a state.store.")


def read(argv: Sequence[str]) -> CheckpointArgs:
    """Parse the arguments.

    Raises:
        UserError: no action, or an unknown one, is named.
        ConfigError: the path is missing, or a flag is wrong.
        SystemExit: after printing help.
    """
    if not argv or argv[0].startswith("-"):
        if asks_for_help(argv):
            print(_usage())
            raise SystemExit(0)
        raise UserError(f"superstep checkpoint needs an action; name one of {', '.join(WORDS)}.")
    word = next((known for known in get_args(Word) if known == argv[0]), None)
    if word is None:
        raise UserError(f"superstep checkpoint has no action '{argv[0]}'{did_you_mean(argv[0], WORDS)}")
    if word != "export" and asks_for_help(argv[1:]):
        print(_usage())
        raise SystemExit(0)
    paths = list(takewhile(lambda each: not each.startswith("-"), argv[1:]))
    flags = argv[1 + len(paths) :]
    options = CopyOptions()
    if word == "export":
        description = f"{WORDS['export'][0].upper()}{WORDS['export'][1:]}."
        options = read_flags(options, flags, prog="superstep checkpoint export RUN", description=description)
    elif flags:
        raise ConfigError(f"superstep checkpoint {word} has no flag {flags[0]}; name only a run or a checkpoint.")
    if len(paths) != 1:
        raise ConfigError(f"exactly one run or checkpoint is needed: superstep checkpoint {word} runs/demo.")
    if word == "export" and not options.out:
        raise ConfigError(
            "--out is missing; name a folder to create: superstep checkpoint export runs/demo --out exported."
        )
    return CheckpointArgs(word, paths[0], options)
