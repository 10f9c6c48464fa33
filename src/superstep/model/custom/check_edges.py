"""Checks of what units take: outputs of units before them, each once, and fields that the batch has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from superstep.errors import ConfigError, did_you_mean
from superstep.model.unit import INPUT, UnitSpec, list_sources
from superstep.plan.model.outline import Outline, Unit


def check_inputs(spec: UnitSpec, specs: Sequence[UnitSpec], before: Sequence[Unit], where: str) -> None:
    """Check that a unit takes outputs of units before it, each once; raises ConfigError."""
    if not isinstance(spec.inputs, tuple) or not all(isinstance(name, str) for name in spec.inputs):
        raise ConfigError(f"{where}: unit '{spec.name}' has inputs = {spec.inputs!r}; give a tuple of names.")
    at = f"{where}: unit '{spec.name}' takes"
    if twice := [name for name in spec.inputs if spec.inputs.count(name) > 1]:
        raise ConfigError(f"{at} '{twice[0]}' twice; name it once, and use the argument twice.")
    known = {unit.name for unit in before}
    later = [name for name in spec.inputs if name not in known and any(other.name == name for other in specs)]
    if later:
        raise ConfigError(
            f"{at} the output of '{later[0]}', which does not come before it; list '{later[0]}' first. Units that take "
            "each other's outputs are a cycle, and cannot be computed."
        )


def check_outputs(outline: Outline, where: str) -> None:
    """Check that every output but the last is taken; raises ConfigError."""
    taken = {unit for units in outline.inputs for unit in units}
    unused = [name for number, name in enumerate(outline.names[:-1]) if outline.inputs and number not in taken]
    if unused:
        raise ConfigError(
            f"{where}: no unit takes the output of '{unused[0]}', so that it would learn nothing; name it in the "
            "inputs of another unit, or leave it out."
        )


def require_fields(specs: Sequence[UnitSpec], fields: Collection[str], where: str) -> None:
    """Check that what units take exists.

    Raises:
        ConfigError: a name is neither a unit nor one of the batch's ``fields``, or is both.
    """
    if both := {name for spec in specs for name in spec.inputs if name in fields and name in {u.name for u in specs}}:
        raise ConfigError(
            f"{where}: '{min(both)}' is a unit and a field of the batch, and units take it; give the unit another name."
        )
    for spec, sources in zip(specs, list_sources(specs), strict=True):
        for name in sources:
            if isinstance(name, str) and name != INPUT and name not in fields:
                known = [*(unit.name for unit in specs if unit is not spec), *fields]
                raise ConfigError(
                    f"{where}: unit '{spec.name}' takes '{name}', which is neither a unit nor a field of the batch "
                    f"({', '.join(sorted(fields))}){did_you_mean(name, known)}"
                )
