"""superstep sample: text from the newest checkpoint of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor

from superstep.cli.options import read_flags
from superstep.data.tokenizer import Tokenizer, load_tokenizer
from superstep.errors import ConfigError, StateError
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.hf import load_weights
from superstep.model.source import load_units
from superstep.model.unit import Row, global_tensors
from superstep.plan.config import RunConfig
from superstep.plan.model.hf_config import from_hf_config
from superstep.plan.toml import read_config
from superstep.state.folders import checkpoints
from superstep.train.sample import Model, generate
from superstep.train.session import RunFolder

DESCRIPTION = "Write text with a trained run."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which run, and how to draw."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = ""
    """The run directory."""
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")] = ""
    """What the text starts with."""
    tokens: int = 200
    """The most tokens to write."""
    temperature: float = 0.8
    """How freely to draw; 0 takes the likeliest token each time."""
    seed: int = 0


def main(argv: Sequence[str]) -> int:
    """Print the prompt and what follows."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    options = read_flags(Options(), argv[len(words) :], prog="superstep sample", description=DESCRIPTION)
    if len(words) != 2:
        raise ConfigError('name a run and a prompt, then any flags: superstep sample runs/demo "def ".')
    run, prompt = words
    if options.tokens < 1:
        raise ConfigError(f"--tokens = {options.tokens} must be at least 1.")
    if not options.temperature >= 0:
        raise ConfigError(f"--temperature = {options.temperature} must be at least 0.")
    written = text(
        Path(run),
        prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    sys.stdout.write(written + "\n")
    return 0


def text(run: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and what a run's newest checkpoint makes of it.

    Raises:
        StateError: there is no such run, or it has no checkpoint yet.
        ConfigError: the prompt is empty.
    """
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character.")
    config, model, tokenizer = _load(run)
    ids = tokenizer.encode(prompt)
    drawn = generate(
        model,
        ids,
        tokens=tokens,
        window_tokens=config.data.sequence_tokens,
        temperature=temperature,
        seed=seed,
        end_of_text=tokenizer.end_of_text,
    )
    return tokenizer.decode(ids + list(drawn))


def _load(run: Path) -> tuple[RunConfig, Model, Tokenizer]:
    folder = RunFolder(root=run)
    if not folder.config.is_file():
        raise StateError(f"'{run}' is no run directory: it has no run.toml. Name the folder that train wrote.")
    found = checkpoints(folder.checkpoints)
    if not found:
        raise StateError(f"'{run}' has no checkpoint yet; train it for at least state.save_every steps.")
    config = read_config(folder.config)
    model, tensors = _decoder(found[-1]) if config.model.source is None else _own(config)
    load_weights(found[-1], tensors)
    return config, model, load_tokenizer(found[-1] / "tokenizer.json")


def _decoder(checkpoint: Path) -> tuple[Model, Mapping[str, Tensor]]:
    shape = from_hf_config(checkpoint / "config.json")
    model = Decoder(shape)
    return model, global_tensors(model, units(shape))


def _own(config: RunConfig) -> tuple[Model, Mapping[str, Tensor]]:
    """The units of a user's file, in a row."""
    model = Row(load_units(config), config.train.seed)
    return model, {name: view for spec, param in model.parts.values() for name, view in spec.views(param)}
