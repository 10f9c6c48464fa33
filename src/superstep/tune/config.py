"""TuneConfig: a run, and what post-training is told besides. One recipe.toml holds both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from superstep.plan.config import DataConfig, ModelConfig, RunConfig, StateConfig, TrainConfig
from superstep.plan.toml import build, literal, read_tables, write_fields

TooLong = Literal["refuse", "drop", "truncate"]
History = Literal["refuse", "split"]

USUAL: Mapping[str, Mapping[str, Any]] = {
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
class TuneConfig(RunConfig):
    """One recipe, whole."""

    data: DataConfig = field(default_factory=lambda: DataConfig(**USUAL["data"]))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(**USUAL["train"]))
    state: StateConfig = field(default_factory=lambda: StateConfig(**USUAL["state"]))
    start: str = ""
    """What to begin with: a run, a checkpoint or a Hugging Face folder. Its shape, tokenizer and chat template are the
    tuned model's."""
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)

    @property
    def run(self) -> RunConfig:
        """What training is told."""
        return RunConfig(**{each.name: getattr(self, each.name) for each in fields(RunConfig)})


def read_recipe(path: Path) -> TuneConfig:
    """The recipe that a TOML file describes; what it leaves out keeps the default.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an unknown key or a value of the wrong type.
    """
    raw = read_tables(path)
    for section, usual in USUAL.items():
        if isinstance(raw.get(section), dict):
            raw[section] = {**usual, **raw[section]}
    return build(TuneConfig, raw)


def write_recipe(config: TuneConfig) -> str:
    """The TOML text that ``read_recipe`` reads back as an equal value."""
    sections = {each.name: value for each in fields(config) if is_dataclass(value := getattr(config, each.name))}
    lines = [f"start = {literal(config.start)}", ""]
    for name, section in sections.items():
        if name != "model" or section != ModelConfig():  # it is that of the start
            lines += [f"[{name}]", *write_fields(section), ""]
    return "\n".join(lines)
