"""TuneConfig: a run, and what post-training is told besides. One recipe.toml holds both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from superstep.plan.config import DataConfig, StateConfig, TrainConfig
from superstep.tune.recipe import Recipe, Usual, read

TooLong = Literal["refuse", "drop", "truncate"]
History = Literal["refuse", "split"]

USUAL: Usual = {
    "data": {"sequence_tokens": 1024, "document_mask": True},
    "train": {"lr": 2e-5, "weight_decay": 0.0},
    "state": {"dir": "runs/tuned"},
}
"""What a recipe says of a run where it says nothing: other than a run that begins with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """How conversations become sequences to learn."""

    template: str | None = None
    """A Jinja file that shows conversations, kept with the checkpoints; none takes the template of `start`, and where
    that has none, one of ours that ends answers with the end of text."""
    too_long: TooLong = "refuse"
    """What to do with a conversation that is longer than a sequence: refuse it by its line, drop it, or truncate it at
    its end. What is dropped and truncated is counted."""
    epochs: float | None = None
    """Passes over the sequences that conversations make, in the place of `train.steps`; the last step may go a little
    beyond. Raise it to go on with a run."""
    history: History = "refuse"
    """What to do where the template shows earlier turns otherwise than they were said, without their thoughts say:
    refuse the record, or split it, so that each turn is learnt after what was shown before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """Direct preference optimisation (Rafailov 2023): of two answers the better one is made likelier. Records are shown
    and cut as `sft` says."""

    beta: float = 0.1
    """How near the model stays to the one that it begins with; above 0."""
    label_smoothing: float = 0.0
    """The share of preferences that may be wrong (conservative DPO, Mitchell 2023); below one half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig(Recipe):
    """One recipe, whole."""

    data: DataConfig = field(default_factory=lambda: DataConfig(**USUAL["data"]))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(**USUAL["train"]))
    state: StateConfig = field(default_factory=lambda: StateConfig(**USUAL["state"]))
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)


def read_recipe(path: Path) -> TuneConfig:
    """The recipe that a TOML file describes; raises as ``recipe.read`` does."""
    return read(TuneConfig, USUAL, path)
