"""FreezeConfig and PhasesConfig: which parameters are trained, and how in each phase of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeConfig:
    """Parameters that are not trained: they have no gradient and no moments, and nothing is computed backward in front
    of the first trained unit.
    """

    params: tuple[str, ...] = ()
    """Patterns of their names, such as `model.layers.0.*`; `*` stands for any characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesConfig:
    """What the phases of a step set for themselves: tables by the phase's name. Where a phase has no entry, the value
    of `[train]` holds.
    """

    lr: tuple[tuple[str, float], ...] = ()
    """The highest learning rate of a phase; it rises and falls as `[train]` says."""
    beta1: tuple[tuple[str, float], ...] = ()
    """`train.beta1` of a phase."""
    beta2: tuple[tuple[str, float], ...] = ()
    """`train.beta2` of a phase."""
    weight_decay: tuple[tuple[str, float], ...] = ()
    """`train.weight_decay` of a phase."""
    clip_norm: tuple[tuple[str, float], ...] = ()
    """`train.clip_norm` of a phase, for the norm of its gradients."""
    loss_weights: tuple[tuple[str, float], ...] = ()
    """By the name of a loss, its weight in a model with several losses; without an entry it is 1."""
