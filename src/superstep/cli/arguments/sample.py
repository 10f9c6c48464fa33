"""Arguments of superstep sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from superstep.cli.flags.options import Bounds, read_names
from superstep.errors import ConfigError

DESCRIPTION = "Continue a text with a trained run. RUN is the folder of the run, PROMPT is the beginning of the text."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Sampling options."""

    tokens: Annotated[int, Bounds(least=1)] = 200
    """The most tokens to write."""
    temperature: Annotated[float, Bounds(least=0)] = 0.8
    """Randomness of sampling; 0 takes the likeliest token each time."""
    seed: int = 0
    """The seed of the draws."""
    step: int | None = None
    """Step of the checkpoint; none uses the newest."""


def read(argv: Sequence[str]) -> tuple[Path, str, SampleOptions]:
    """The run, the prompt and the options.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    words, options = read_names(SampleOptions(), argv, prog="superstep sample RUN PROMPT", description=DESCRIPTION)
    if len(words) == 1 and not Path(words[0]).exists():
        raise ConfigError(
            f"'{words[0]}' does not exist; name the folder of a run, then a prompt: "
            'superstep sample runs/demo "def ".'
        )
    if len(words) != 2:
        raise ConfigError('a run and a prompt are needed, then any flags: superstep sample runs/demo "def ".')
    run, prompt = words
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character.")
    if not Path(run).exists():
        raise ConfigError(f"'{run}' does not exist; name the folder of a run.")
    return Path(run), prompt, options
