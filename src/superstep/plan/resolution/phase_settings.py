"""The settings of the phases of a step: those of ``[train]`` with those of ``[phases]`` over them, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.config import RunConfig, TrainConfig
from superstep.plan.model.outline import Outline
from superstep.plan.trained_parts import PhasesConfig

OPTIMIZER = ("lr", "beta1", "beta2", "weight_decay", "clip_norm")
"""The tables of ``[phases]`` that replace a value of ``[train]``."""

_ABOVE_ZERO: tuple[Callable[[float], bool], str] = lambda x: 0 < x < math.inf, "above 0 and finite"
_FROM_ZERO: tuple[Callable[[float], bool], str] = lambda x: 0 <= x < math.inf, "at least 0 and finite"
_SHARE: tuple[Callable[[float], bool], str] = lambda x: 0 <= x < 1, "at least 0 and below 1"
RANGES = {
    "lr": _ABOVE_ZERO,
    "beta1": _SHARE,
    "beta2": _SHARE,
    "weight_decay": _FROM_ZERO,
    "clip_norm": _ABOVE_ZERO,
    "loss_weights": _FROM_ZERO,
}


def train_of_phase(train: TrainConfig, phases: PhasesConfig | None, phase: str) -> TrainConfig:
    """The ``[train]`` of one phase."""
    if phases is None:
        return train
    tables = {name: dict(getattr(phases, name)) for name in OPTIMIZER}
    return replace(train, **{name: table[phase] for name, table in tables.items() if phase in table})


def check_phases(config: RunConfig, outline: Outline) -> None:
    """Check ``[phases]`` against the phases and losses of the model, and refuse what a step of several phases does not
    support; raises ConfigError.
    """
    if outline.phases:
        _refuse_others(config)
    if config.phases is None:
        return
    for table, (is_in_range, rule) in RANGES.items():
        known, what = (outline.losses, "loss") if table == "loss_weights" else (outline.phases, "phase")
        for name, value in getattr(config.phases, table):
            _check_name(f"phases.{table}", name, known, what)
            if not is_in_range(value):
                raise ConfigError(f"phases.{table}.{name} = {value} must be {rule}.")


def _check_name(table: str, name: str, known: Sequence[str], what: str) -> None:
    if not known:
        several = "several losses" if what == "loss" else "step of several phases"
        raise ConfigError(f"{table}.{name}: the model has no {several}; leave the table out.")
    if name not in known:
        raise ConfigError(f"{table}.{name}: the model has no {what} '{name}'{did_you_mean(name, known)}")


def _refuse_others(config: RunConfig) -> None:
    settings = {
        "[lora]": config.lora,
        "[freeze]": config.freeze,
        "[rollback]": config.rollback,
        "train.loss": config.train.loss,
        "state.recompute_every": config.state.recompute_every,
        "state.fingerprint_every": config.state.fingerprint_every,
        "numerics.compile": config.numerics.compile or None,
    }
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(f"{name} with a model whose step has several phases is not supported; leave it out.")
