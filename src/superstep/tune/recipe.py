"""Recipe: a run and the settings of post-training, in one recipe.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from superstep.errors import ConfigError, StateError
from superstep.plan.config import DataConfig, ModelConfig, ProposedRun, RunConfig, TrainConfig
from superstep.plan.config_io import build, literal, read_config, read_tables, write_fields
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.sizes.lookup import shape_of
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.weights_folder import weights_of

RECIPE = "recipe.toml"
"""The recipe's file in the directory of its run."""

Usual = Mapping[str, Mapping[str, Any]]
"""Defaults by section that differ from those of a run with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(ProposedRun):
    """Settings of every kind of recipe; each adds sections of its own."""

    start: str = ""
    """Initial model: a run, a checkpoint or a Hugging Face folder. The tuned model has its shape, tokenizer and chat
    template.
    """


R = TypeVar("R", bound=Recipe)


def read(kind: type[R], usual: Usual, path: Path) -> R:
    """The recipe in a TOML file; missing values keep their defaults.

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
        if is_dataclass(section) and (each.name != "model" or section != ModelConfig()):  # the start has its own
            lines += [f"[{each.name}]", *write_fields(section), ""]
    return "\n".join(lines)


def start_folder(start: str) -> Path:
    """The folder of a recipe's initial model: weights, ``config.json`` and ``tokenizer.json``.

    Args:
        start: of the recipe.

    Raises:
        ConfigError: it is empty, or names a run of a user's own model.
        StateError: the model is missing or incomplete.
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


def run_with(
    proposed: ProposedRun,
    model: ModelConfig,
    tokenizer: str | None,
    usual_tokens: int,
    decoder: ModelShape | None = None,
) -> RunConfig:
    """A proposed run, with its initial model.

    Args:
        tokenizer: the model's.
        usual_tokens: default sequence length, at most the model's.
        decoder: the shape of the model's decoder; None for that of the model's section.

    Raises:
        ConfigError: the model cannot be trained.
    """
    if proposed.data.source is not None:
        raise ConfigError(
            f"data.source = '{proposed.data.source}' has samples for superstep train, and superstep tune reads "
            "conversations; name their records by data.corpus."
        )
    tokens = proposed.data.sequence_tokens
    if tokens is None:
        tokens = min(usual_tokens, (decoder or shape_of(model)).max_tokens)
    sections = {each.name: getattr(proposed, each.name) for each in fields(RunConfig)}
    data = {each.name: getattr(proposed.data, each.name) for each in fields(DataConfig)}
    data |= {"tokenizer": tokenizer, "sequence_tokens": tokens}
    return RunConfig(**(sections | {"model": model, "data": DataConfig(**data)}))


def refuse_own_loss(train: TrainConfig, verb: str) -> None:
    """Refuse ``train.loss`` for a verb with its own loss.

    Raises:
        ConfigError: it is set.
    """
    if train.loss is not None:
        raise ConfigError(f"train.loss = '{train.loss}': superstep {verb} has a loss of its own; leave train.loss out.")


def shorter_sequences(proposed: ProposedRun, run: RunConfig, usual_tokens: int) -> str | None:
    """A note that the default sequence length is reduced; None where it is not."""
    tokens = run.data.sequence_tokens
    if proposed.data.sequence_tokens is not None or tokens == usual_tokens:
        return None
    return f"data.sequence_tokens = {tokens} (not {usual_tokens}): the model was made for no more."
