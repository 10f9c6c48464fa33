"""TuneConfig: a run and the settings of post-training, in one recipe.toml."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from superstep.errors import ConfigError
from superstep.plan.config import ProposedData, StateConfig, TrainConfig
from superstep.tune.recipe import Recipe, Usual, read, refuse_own_loss

TooLong = Literal["refuse", "drop", "truncate"]
History = Literal["refuse", "split"]

USUAL: Usual = {
    "data": {"document_mask": True},
    "train": {"lr": 2e-5, "weight_decay": 0.0},
    "state": {"dir": "runs/tuned"},
}
"""Defaults of a recipe's run that differ from those of a run with random weights."""

USUAL_TOKENS = 1024
"""Default sequence length, if the model supports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """How conversations become sequences to learn."""

    template: str | None = None
    """A Jinja chat template, kept with the checkpoints; none uses the template of `start`, or, without one there, a
    default that ends answers with the end of text.
    """
    too_long: TooLong = "refuse"
    """What to do with a conversation that is longer than a sequence: refuse it and name its line, drop it, or truncate
    it at its end. Dropped and truncated ones are counted.
    """
    epochs: float | None = None
    """Passes over the sequences of the conversations, in place of `train.steps`; the last step may go a little beyond.
    Raise it to continue a run.
    """
    history: History = "refuse"
    """What to do where the template renders earlier turns differently, such as without their thoughts: refuse the
    record, or split it, so that each turn is learnt after the text that was rendered before it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """Direct preference optimisation (Rafailov 2023): make the better of two answers likelier. Records are rendered and
    cut as `sft` says.
    """

    beta: float = 0.1
    """How close the model stays to its initial weights; above 0."""
    label_smoothing: float = 0.0
    """The share of preferences that may be wrong (conservative DPO, Mitchell 2023); below one half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig(Recipe):
    """A complete recipe."""

    data: ProposedData = field(default_factory=lambda: ProposedData(**USUAL["data"]))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(**USUAL["train"]))
    state: StateConfig = field(default_factory=lambda: StateConfig(**USUAL["state"]))
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)


def read_recipe(path: Path) -> TuneConfig:
    """The recipe in a TOML file; raises as ``recipe.read`` does."""
    return read(TuneConfig, USUAL, path)


def check_recipe(kind: Literal["sft", "dpo"], config: TuneConfig) -> None:
    """Check a recipe's own settings.

    Raises:
        ConfigError: one is invalid, or the recipe gives the run's length twice.
    """
    if kind == "dpo":
        _check_dpo(config.dpo)
        refuse_own_loss(config.train, "tune dpo")
    epochs = config.sft.epochs
    if epochs is None:
        return
    if not 0 < epochs < math.inf:
        raise ConfigError(f"sft.epochs = {epochs:g} must be above 0; 1 is one pass, and train.steps counts steps.")
    if config.train.steps != TuneConfig().train.steps:
        raise ConfigError(
            f"sft.epochs = {epochs:g} and train.steps = {config.train.steps} both set the length of the run; leave one "
            "of them out."
        )


def _check_dpo(config: DpoConfig) -> None:
    if not config.beta > 0:
        raise ConfigError(
            f"dpo.beta = {config.beta} must be above 0: it keeps the model close to the reference; try 0.1."
        )
    if not 0 <= config.label_smoothing < 0.5:
        raise ConfigError(
            f"dpo.label_smoothing = {config.label_smoothing} must be at least 0 and below 0.5; 0 trusts every label."
        )
