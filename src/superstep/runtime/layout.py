"""How a unit's parameters lie in its flat buffer, and which part of which global tensor each rank holds.

One unit is one flat buffer: what ZeRO gathers, reduces and updates at once. Inside it lie first the matrices, then
the vectors, so that weight decay is a range; among the vectors those whose gradient is partial over tp come last,
so that they are a range too. The end is padded until the buffer splits evenly over dp.

    | wq | wk | wv | wo | gate | up | down || q_norm | k_norm | input_norm | post_norm | pad |
      matrices, decayed                       vectors; partial over tp
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from superstep.errors import ConfigError
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.mesh import Coordinate, MeshShape
from superstep.plan.padding import padded

# Logical axis to mesh axis, as GSPMD's annotation does (Xu 2021).
RULES: Mapping[str, str] = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "ffn": "tp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter inside a unit's flat buffer.

    Attributes:
        local: its name in the unit's module.
        spec: what it is globally.
        shape: the global tensor's shape.
        index: the part of the global tensor this tp rank holds, a slice for each dim.
        start: its first element in the flat buffer.
        is_partial: whether the tp ranks all hold it whole and each sees only a part of its gradient.
    """

    local: str
    spec: ParamSpec
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    start: int
    is_partial: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part held here."""
        return tuple(s.stop - s.start for s in self.index)

    @property
    def stop(self) -> int:
        """One past its last element in the flat buffer."""
        return self.start + math.prod(self.local_shape)

    @property
    def is_replicated(self) -> bool:
        """Whether every tp rank holds the whole tensor."""
        return self.local_shape == self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """A unit's flat buffer.

    Attributes:
        slots: its parameters, in the order of the buffer; a tied parameter is in its owner's buffer only.
        decayed: elements before this one take weight decay.
        partial: elements from this one up to ``numel`` have partial gradients over tp.
        numel: elements in use.
        padded: elements in all, a multiple of dp.
    """

    name: str
    slots: tuple[Slot, ...]
    decayed: int
    partial: int
    numel: int
    padded: int


def lay_out(
    specs: tuple[UnitSpec, ...], mesh: MeshShape, at: Coordinate, *, sequence_parallel: bool
) -> tuple[UnitLayout, ...]:
    """The flat buffer of every unit, as the rank at ``at`` holds it."""
    owned: set[str] = set()
    layouts = []
    for spec in specs:
        shapes = {name: tuple(p.shape) for name, p in _parameters(spec)}
        fresh = {local: param for local, param in spec.params.items() if param.name not in owned}
        owned |= {param.name for param in fresh.values()}
        layouts.append(_lay_out(spec.name, fresh, shapes, mesh, at, sequence_parallel=sequence_parallel))
    return tuple(layouts)


def _parameters(spec: UnitSpec) -> list[tuple[str, nn.Parameter]]:
    with torch.device("meta"):
        return list(spec.build().named_parameters())


def _lay_out(
    name: str,
    params: Mapping[str, ParamSpec],
    shapes: Mapping[str, tuple[int, ...]],
    mesh: MeshShape,
    at: Coordinate,
    *,
    sequence_parallel: bool,
) -> UnitLayout:
    def is_partial(local: str) -> bool:
        axes = params[local].axes
        return mesh.tp > 1 and ("head_dim" in axes or ("norm" in axes and sequence_parallel))

    # Matrices, whole vectors, partial vectors.
    order = sorted(params, key=lambda local: (len(shapes[local]) < 2, is_partial(local)))
    slots: list[Slot] = []
    start, decayed, partial = 0, 0, -1
    for local in order:
        index = cut(params[local], shapes[local], mesh, at)
        slot = Slot(
            local=local,
            spec=params[local],
            shape=shapes[local],
            index=index,
            start=start,
            is_partial=is_partial(local),
        )
        assert not (slot.is_partial and len(slot.shape) > 1), "a matrix with partial gradients has no place"
        if slot.is_partial and partial < 0:
            partial = start
        start = slot.stop
        decayed = start if len(slot.shape) > 1 else decayed
        slots.append(slot)
    return UnitLayout(
        name=name,
        slots=tuple(slots),
        decayed=decayed,
        partial=start if partial < 0 else partial,
        numel=start,
        padded=padded(start, mesh.dp),
    )


def cut(spec: ParamSpec, shape: tuple[int, ...], mesh: MeshShape, at: Coordinate) -> tuple[slice, ...]:
    """The part of a global tensor that the rank at ``at`` holds, before ZeRO.

    Raises:
        ConfigError: a dim does not split over the mesh axis that the rules give its logical axis.
    """
    index = []
    for size, axis in zip(shape, spec.axes, strict=True):
        degree, place = (mesh.tp, at.tp) if axis is not None and RULES.get(axis) == "tp" else (1, 0)
        if size % degree:
            raise ConfigError(f"{spec.name}: its dim '{axis}' of {size} does not split over plan.tp = {degree}.")
        share = size // degree
        index.append(slice(place * share, (place + 1) * share))
    return tuple(index)
