"""superstep sample: text from the newest checkpoint of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from superstep.cli.arguments.sample import read
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
from superstep.train.run_folder import RunFolder
from superstep.train.sample import Model, generate


def main(argv: Sequence[str]) -> int:
    """Print the prompt and what follows."""
    run, prompt, options = read(argv)
    written = text(run, prompt, tokens=options.tokens, temperature=options.temperature, seed=options.seed)
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
    if not run.exists():
        raise StateError(f"'{run}' is not there; name the folder that train wrote.")
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
