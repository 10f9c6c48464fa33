"""Outline: the facts about any model that a plan needs.

A plan splits units over pipeline ranks and parameters over tensor-parallel ones. It needs no module and no tensor for
that, only the names of the units, and each parameter's name, axes, dims and kind of layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from superstep.plan.block_weights import BlockFormat
from superstep.plan.model.shape import ModelShape
from superstep.plan.rules import Rules

Layer = Literal["linear", "convolution", "embedding", "other"]
"""A parameter's role in cutting: it multiplies (or is a bias or a norm of all heads), convolves, is looked up, or none
of these."""

Factor = Literal["a", "b"]
"""The first factor of an adapter, [rank, inputs], or the second, [outputs, rank]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a unit.

    Attributes:
        name: the global tensor's; units that name the same tensor share it.
        axes: a logical axis for each dim, None where a dim has none.
        dims: the global tensor's shape.
        is_plain: whether its layer has no forward, hooks or options of its own, so that it can be cut.
        groups: of a convolution: the parts of its input and output that are convolved apart.
        factor: which factor of an adapter it is; None for the model's own.
        is_statistic: whether it is a running statistic.
        is_frozen: whether it is not trained.
        block_format: of a frozen matrix in blocks of few bits; None for other parameters.
        is_sparse: whether it is a table of which only the rows that a step touches have a gradient.
        sections: rows of each part that tp cuts on its own; () where it cuts the whole.
    """

    name: str
    axes: tuple[str | None, ...]
    dims: tuple[int, ...]
    layer: Layer
    is_plain: bool = True
    groups: int = 1
    factor: Factor | None = None
    is_statistic: bool = False
    is_frozen: bool = False
    block_format: BlockFormat | None = None
    is_sparse: bool = False
    sections: tuple[int, ...] = ()

    def numel(self, rules: Rules, tp: int) -> int:
        """Elements on one tensor-parallel rank."""
        return math.prod(self.dims) // (tp if "tp" in map(rules.cut, self.axes) else 1)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit.

    Attributes:
        parameters: all that it reads.
        inputs: names of the units whose outputs it takes, and of fields of the batch; if empty, it takes the output of
            the unit before.
        phase: in which it is trained, of a step of several phases.
        is_encoder: whether it is part of an encoder, which ``plan.encoder`` places.
        phase_inputs: of the last unit: phases in which it has other inputs, and these.
    """

    name: str
    parameters: tuple[Parameter, ...]
    inputs: tuple[str, ...] = ()
    phase: str = ""
    is_encoder: bool = False
    phase_inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Outline:
    """A model's units, each after those whose outputs it takes. The loss is of the last one's output.

    Attributes:
        phases: names of the phases of a step, in their order; () for a step of one.
        losses: names of the losses that have weights; () where each phase has one loss.
        decoder: behind encoders; None in a model without.
        tokens: of a row of samples that the decoder reads.
    """

    units: tuple[Unit, ...]
    phases: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    decoder: ModelShape | None = None
    tokens: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units)

    @property
    def numel(self) -> int:
        """Elements of all parameters; shared ones count once."""
        return sum(math.prod(p.dims) for owned in self.owned for p in owned)

    @property
    def owned(self) -> tuple[tuple[Parameter, ...], ...]:
        """What each unit owns: a shared parameter belongs to the first unit that names it."""
        owners = self._owners()
        return tuple(
            tuple(p for p in unit.parameters if owners[p.name] == number) for number, unit in enumerate(self.units)
        )

    @property
    def encoder(self) -> tuple[int, ...]:
        """The units of encoders."""
        return tuple(number for number, unit in enumerate(self.units) if unit.is_encoder)

    @property
    def sparse(self) -> tuple[int, ...]:
        """The units that own trained tables with sparse gradients."""
        return tuple(n for n, owned in enumerate(self.owned) if any(p.is_sparse and not p.is_frozen for p in owned))

    @property
    def is_tied(self) -> bool:
        return any(len(reads) > 1 for reads in self.reads)

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each unit, the units that own the parameters that it reads: itself first."""
        owners = self._owners()
        return tuple(
            (number, *sorted({owners[p.name] for p in unit.parameters} - {number}))
            for number, unit in enumerate(self.units)
        )

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each unit, the units whose outputs it takes, in the order of its arguments; () for a chain."""
        return self.inputs_in("")

    def inputs_in(self, phase: str) -> tuple[tuple[int, ...], ...]:
        """The same in one phase, in which the last unit may have inputs of its own."""
        numbers = {name: number for number, name in enumerate(self.names)}
        *others, last = self.units
        last = replace(last, inputs=dict(last.phase_inputs).get(phase, last.inputs))
        taken = tuple(
            tuple(numbers[name] for name in unit.inputs if name in numbers)
            if unit.inputs
            else tuple(range(max(number - 1, 0), number))
            for number, unit in enumerate((*others, last))
        )
        is_chain = all(units == tuple(range(max(number - 1, 0), number)) for number, units in enumerate(taken))
        return () if is_chain else taken

    @property
    def shared_fields(self) -> tuple[str, ...] | None:
        """The fields of which each context-parallel rank has its tokens, and of others all; None for every field."""
        if self.decoder is None:
            return None
        read = (name for unit in self.units if not unit.is_encoder for name in unit.inputs)
        return tuple(dict.fromkeys(name for name in read if name not in self.names))

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """Whether the recompute policy covers the unit: all but the first and the last."""
        last = len(self.units) - 1
        return tuple(0 < number < last for number in range(len(self.units)))

    def _owners(self) -> dict[str, int]:
        owners: dict[str, int] = {}
        for number, unit in enumerate(self.units):
            for parameter in unit.parameters:
                owners.setdefault(parameter.name, number)
        return owners
