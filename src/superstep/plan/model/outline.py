"""Outline: what a plan must know of a model, whatever the model is.

A plan splits units over pipeline ranks and parameters over tensor-parallel ones. For that it needs no module and no
tensor: the names of the units, and of each parameter its name, its axes, its dims and the kind of layer that has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from superstep.plan.rules import Rules

Layer = Literal["linear", "embedding", "other"]
"""What a parameter does as far as cutting goes: it multiplies (or is the bias of such), is looked up, or neither."""

Factor = Literal["a", "b"]
"""Of an adapter: the first factor, [rank, inputs], or the second, [outputs, rank]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a unit.

    Attributes:
        name: the global tensor's; units that name the same tensor share it.
        axes: a logical axis for each dim, None where a dim has none.
        dims: the global tensor's shape.
        layer: the kind of the layer that has it.
        is_plain: whether that layer has no forward, hooks or options of its own, so that it can be cut.
        factor: which factor of an adapter it is; None where it is the model's own.
    """

    name: str
    axes: tuple[str | None, ...]
    dims: tuple[int, ...]
    layer: Layer
    is_plain: bool = True
    factor: Factor | None = None

    def numel(self, rules: Rules, tp: int) -> int:
        """Elements of it on one tensor-parallel rank."""
        return math.prod(self.dims) // (tp if "tp" in map(rules.cut, self.axes) else 1)


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit: its name, and all parameters that it reads."""

    name: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """A model's units in order. The first takes the input, the last gives what the loss is of."""

    units: tuple[Unit, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The units' names."""
        return tuple(unit.name for unit in self.units)

    @property
    def numel(self) -> int:
        """Elements of all parameters; what is shared counts once."""
        return sum(math.prod(p.dims) for owned in self.owned for p in owned)

    @property
    def owned(self) -> tuple[tuple[Parameter, ...], ...]:
        """What each unit owns: a shared parameter belongs to the first unit that names it."""
        owners = self._owners()
        return tuple(
            tuple(p for p in unit.parameters if owners[p.name] == number) for number, unit in enumerate(self.units)
        )

    @property
    def is_tied(self) -> bool:
        """Whether units share parameters."""
        return any(len(reads) > 1 for reads in self.reads)

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each unit, the units whose parameters it reads: itself first, then the owners of what it shares."""
        owners = self._owners()
        return tuple(
            (number, *sorted({owners[p.name] for p in unit.parameters} - {number}))
            for number, unit in enumerate(self.units)
        )

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """Whether the recompute policy covers the unit: all do but the first and the last."""
        last = len(self.units) - 1
        return tuple(0 < number < last for number in range(len(self.units)))

    def _owners(self) -> dict[str, int]:
        owners: dict[str, int] = {}
        for number, unit in enumerate(self.units):
            for parameter in unit.parameters:
                owners.setdefault(parameter.name, number)
        return owners
