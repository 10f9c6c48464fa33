"""Recipe: a run, and what post-training is told besides. One recipe.toml holds both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from superstep.errors import ConfigError, StateError
from superstep.plan.config import DataConfig, ModelConfig, ProposedRun, RunConfig, TrainConfig
from superstep.plan.config_io import build, literal, read_config, read_tables, write_fields
from superstep.plan.model.lookup import shape_of
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.weights_folder import weights_of

RECIPE = "recipe.toml"
"""What a recipe is called in the directory of its run."""

Usual = Mapping[str, Mapping[str, Any]]
"""What a kind of recipe says of a run where it says nothing, by section: other than a run that begins with random
weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(ProposedRun):
    """What every kind of recipe has; each adds sections of its own."""

    start: str = ""
    """What to begin with: a run, a checkpoint or a Hugging Face folder. Its shape, tokenizer and chat template are the
    tuned model's."""


R = TypeVar("R", bound=Recipe)


def read(kind: type[R], usual: Usual, path: Path) -> R:
    """The recipe that a TOML file describes; what it leaves out keeps the default.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an unknown key or a value of the wrong type.
    """
    raw = read_tables(path)
    for section, defaults in usual.items():
        if isinstance(raw.get(section), dict):
            raw[section] = {**defaults, **raw[section]}
    return build(kind, raw)


def write(recipe: Recipe) -> str:
    """The TOML text that ``read`` reads back as an equal value."""
    lines = [f"start = {literal(recipe.start)}", ""]
    for each in fields(recipe):
        section = getattr(recipe, each.name)
        if is_dataclass(section) and (each.name != "model" or section != ModelConfig()):  # it is that of the start
            lines += [f"[{each.name}]", *write_fields(section), ""]
    return "\n".join(lines)


def start_folder(start: str) -> Path:
    """The folder of the model that a recipe begins with: weights, ``config.json`` and ``tokenizer.json``.

    Args:
        start: as the recipe has it.

    Raises:
        ConfigError: it is empty, or names a run of a model of the user's own.
        StateError: there is no model, or not all of it.
    """
    if not start:
        raise ConfigError(
            "start is left out; name a run, a checkpoint or a Hugging Face folder to begin with: --start runs/demo."
        )
    folder, run = weights_of(Path(start)), RunFolder(root=Path(start)).config
    if run.is_file() and read_config(run).model.source is not None:
        raise ConfigError(f"start = '{start}' is of a model of your own, which has no config.json to begin with.")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StateError(
                f"start = '{start}' has no {name}; name a run, a checkpoint or a Hugging Face folder that has a model "
                "whole."
            )
    return folder


def run_with(proposed: ProposedRun, model: ModelConfig, tokenizer: str | None, usual_tokens: int) -> RunConfig:
    """The run that a recipe proposes, with the model that it begins with.

    Args:
        tokenizer: the model's.
        usual_tokens: of a sequence where the recipe has no length, or as many as the model was made for, if fewer.

    Raises:
        ConfigError: the model is none that can be trained.
    """
    tokens = proposed.data.sequence_tokens
    if tokens is None:
        tokens = min(usual_tokens, shape_of(model).max_tokens)
    sections = {each.name: getattr(proposed, each.name) for each in fields(RunConfig)}
    data = {each.name: getattr(proposed.data, each.name) for each in fields(DataConfig)}
    data |= {"tokenizer": tokenizer, "sequence_tokens": tokens}
    return RunConfig(**(sections | {"model": model, "data": DataConfig(**data)}))


def refuse_own_loss(train: TrainConfig, verb: str) -> None:
    """See that a verb whose loss is its own is given no other.

    Raises:
        ConfigError: it is.
    """
    if train.loss is not None:
        raise ConfigError(f"train.loss = '{train.loss}': superstep {verb} has a loss of its own; leave train.loss out.")


def shorter_sequences(proposed: ProposedRun, run: RunConfig, usual_tokens: int) -> str | None:
    """That sequences whose length a recipe leaves out are shorter than usual; None where they are not."""
    tokens = run.data.sequence_tokens
    if proposed.data.sequence_tokens is not None or tokens == usual_tokens:
        return None
    return f"data.sequence_tokens = {tokens} (not {usual_tokens}): the model was made for no more."
