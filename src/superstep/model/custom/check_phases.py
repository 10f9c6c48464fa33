"""Checks of the phases of a step: each has a loss and trains some unit, and each unit is trained in one of them."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.errors import ConfigError, did_you_mean
from superstep.model.unit import UnitSpec, list_losses, list_phases
from superstep.plan.model.outline import Outline
from superstep.plan.sharding.edges import list_needed_units


def check_phases(specs: Sequence[UnitSpec], where: str) -> None:
    """Check the phases that units name against those of the last unit's losses; raises ConfigError."""
    phases = list_phases(specs)
    trained: dict[str, str] = {}
    for spec in specs:
        if spec.phase and spec.phase not in phases:
            others = (
                did_you_mean(spec.phase, phases) if phases else "; give the last unit a loss for each phase, by name."
            )
            raise ConfigError(
                f"{where}: unit '{spec.name}' is trained in phase '{spec.phase}', which has no loss{others}"
            )
        if spec.phase and not spec.params:
            raise ConfigError(f"{where}: unit '{spec.name}' is trained in phase '{spec.phase}' and has no parameters.")
        if phases and spec.params and not spec.phase:
            raise ConfigError(f"{where}: unit '{spec.name}' names no phase; give it one of {list(phases)}.")
        for param in spec.params.values() if phases else ():
            before = trained.setdefault(param.name, spec.phase)
            if before != spec.phase:
                raise ConfigError(
                    f"{where}: '{param.name}' is trained in the phases '{before}' and '{spec.phase}'; train it in one."
                )
    names = list_losses(specs)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{where}: two losses have the name '{twice[0]}', by which they have weights; rename one.")
    for phase in phases:
        if all(spec.phase != phase for spec in specs):
            raise ConfigError(f"{where}: phase '{phase}' trains nothing; name it in a unit with parameters.")


def check_phase_inputs(specs: Sequence[UnitSpec], outline: Outline, where: str) -> None:
    """Check the inputs that the last unit has in some phases, and that what a phase trains leads to them; raises
    ConfigError.
    """
    *others, last = specs
    if early := [spec.name for spec in others if spec.phase_inputs]:
        raise ConfigError(f"{where}: unit '{early[0]}' has inputs by phase, which only the last unit may have.")
    for phase, inputs in last.phase_inputs.items():
        if phase not in outline.phases:
            known = did_you_mean(phase, outline.phases) if outline.phases else "; leave them out."
            raise ConfigError(f"{where}: unit '{last.name}' has inputs in phase '{phase}', which has no loss{known}")
        if unknown := [name for name in inputs if name not in last.inputs]:
            raise ConfigError(
                f"{where}: unit '{last.name}' takes '{unknown[0]}' in phase '{phase}' alone; name it in its inputs too."
            )
        needed = list_needed_units(outline.inputs_in(phase))
        for number, spec in enumerate(specs):
            if spec.phase == phase and number not in needed:
                raise ConfigError(
                    f"{where}: phase '{phase}' trains unit '{spec.name}', which does not lead to its loss; name "
                    f"another phase, or a unit behind it in the inputs of '{last.name}' in this one."
                )
