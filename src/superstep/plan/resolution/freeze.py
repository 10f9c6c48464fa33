"""Frozen parameters: which parameters of an outline are not trained, by patterns of their names.

They have no gradient, no moments and no master weights, and nothing is computed backward in front of the first trained
unit. With adapters all of the model's own parameters are frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

from superstep.errors import ConfigError
from superstep.plan.model.outline import Outline, Parameter
from superstep.plan.trained_parts import FreezeConfig


def freeze(outline: Outline, config: FreezeConfig) -> Outline:
    """The outline with parameters frozen.

    Raises:
        ConfigError: a pattern matches no parameter, or everything would be frozen.
    """
    every = [p for owned in outline.owned for p in owned]
    names = [p.name for p in every]
    if not config.params:
        raise ConfigError("freeze.params is empty; name parameters, such as 'model.layers.0.*', or leave [freeze] out.")
    for pattern in config.params:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"freeze.params: '{pattern}' matches no parameter of the model; it has '{names[0]}' to '{names[-1]}'."
            )
    frozen = _freeze(outline, lambda p: any(fnmatchcase(p.name, pattern) for pattern in config.params))
    if all(p.is_frozen or p.is_statistic for unit in frozen.units for p in unit.parameters):
        raise ConfigError(
            f"freeze.params = {list(config.params)} freezes every parameter, so that nothing is trained; leave one out."
        )
    return frozen


def freeze_all(outline: Outline) -> Outline:
    """The outline with every parameter frozen."""
    return _freeze(outline, lambda _: True)


def _freeze(outline: Outline, is_frozen: Callable[[Parameter], bool]) -> Outline:
    units = tuple(
        replace(unit, parameters=tuple(replace(p, is_frozen=p.is_frozen or is_frozen(p)) for p in unit.parameters))
        for unit in outline.units
    )
    return replace(outline, units=units)
