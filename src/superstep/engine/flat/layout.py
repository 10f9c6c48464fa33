"""Layout of a unit's parameters in flat buffers, and the part of each global tensor on each rank.

A flat buffer is gathered, reduced and updated as one. A unit has one for its dense parameters and, if it has experts,
one for theirs, because other ranks share those. In a buffer the matrices come first, then the vectors, so that weight
decay is a range; those with gradients that are partial over tp meet in the middle, so that they are a range too.
Parameters with moments in fewer bits than fp32 come before all others. The end is padded until the buffer splits evenly
over its shards.

    | wq | wk | wv | wo | gate | up | down | router || q_norm | k_norm | input_norm | post_norm | bias | pad |
      matrices, decayed                              vectors
                                             partial over tp ---------------------------------|
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from superstep.errors import ConfigError
from superstep.model.meta import on_meta
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.mesh import FAMILIES, Coordinate, Family, MeshShape
from superstep.plan.narrow import BLOCK
from superstep.plan.resolution.lora import ENDS
from superstep.plan.rules import Rules
from superstep.plan.sharding.padding import ALIGN, pad


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter inside a flat buffer.

    Attributes:
        local: its name in the unit's module.
        spec: of the global parameter.
        shape: the global tensor's shape.
        blocks: this rank's part of the global tensor: a slice for each dim, and one after the other for each section.
        padding: rows of zeros after them, where a dim that tp cuts is padded.
        start: its first element in the flat buffer.
        is_partial: whether the tp ranks all hold it whole and each has only a part of its gradient.
        is_narrow: whether its moments have fewer bits than fp32.
    """

    local: str
    spec: ParamSpec
    shape: tuple[int, ...]
    blocks: tuple[tuple[slice, ...], ...]
    padding: int
    start: int
    is_partial: bool
    is_narrow: bool = False

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part of the global tensor."""
        sizes = [tuple(s.stop - s.start for s in block) for block in self.blocks]
        return (sum(rows for rows, *_ in sizes), *sizes[0][1:]) if sizes[0] else ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local parameter: that of the part, and its padding."""
        rows, *others = self.held_shape or (1,)
        return (rows + self.padding, *others) if self.shape else ()

    @property
    def index(self) -> tuple[slice, ...]:
        """The part of a tensor with one section."""
        (block,) = self.blocks
        return block

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of the global tensor."""
        return torch.cat([whole[block] for block in self.blocks]) if len(self.blocks) > 1 else whole[self.index]

    @property
    def held(self) -> int:
        """One past the last element of the global tensor in the flat buffer; padding follows."""
        return self.start + math.prod(self.held_shape)

    @property
    def stop(self) -> int:
        """One past its last element in the flat buffer."""
        return self.start + math.prod(self.local_shape)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self.held_shape == self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """One flat buffer.

    Attributes:
        family: parameters with the same sharing ranks.
        slots: the parameters, in the order of the buffer; a tied parameter is in its owner's buffer only.
        decayed: elements before this one have weight decay.
        partial: the ranges of elements with gradients that are partial over tp.
        numel: elements in use.
        padded: elements in all, a multiple of the shards.
        row_width: of tables with sparse gradients, elements that divide every table's rows; shards are made of whole
            ones. 0 in other buffers.
        narrow: elements before this one have moments in fewer bits than fp32, and shards are cut between their blocks.
    """

    family: Family
    slots: tuple[Slot, ...]
    decayed: int
    partial: tuple[tuple[int, int], ...]
    numel: int
    padded: int
    row_width: int = 0
    narrow: int = 0


def lay_out(  # noqa: PLR0913
    specs: tuple[UnitSpec, ...],
    mesh: MeshShape,
    at: Coordinate,
    rules: Rules,
    *,
    sequence_parallel: bool,
    padding: Sequence[tuple[str, int]] = (),
    is_exact: bool = False,
    narrow: Collection[str] = (),
) -> tuple[tuple[BufferLayout, ...], ...]:
    """The flat buffers of every unit, on the rank at ``at``; a unit without parameters has none.

    Args:
        specs: the units.
        mesh: the degrees.
        at: the rank's place.
        rules: which axes are cut.
        sequence_parallel: whether the residual stream is split over tp.
        padding: for each padded axis, the rows of its parameters over all ranks.
        is_exact: exact mode, where sums over tp are whole on every rank.
        narrow: names of parameters with moments in fewer bits than fp32.

    Raises:
        ConfigError: a dim of a parameter does not split as the rules need, or units that share a whole parameter differ
            in whether they see all tokens or only their rank's.
    """
    owned: set[str] = set()
    layouts = []
    partial: frozenset[str] = frozenset()
    if mesh.tp > 1:
        partial = partial_names(specs, rules, sequence_parallel=sequence_parallel, is_exact=is_exact)
    for spec in specs:
        shapes = {name: tuple(p.shape) for name, p in _parameters(spec)}
        fresh = {local: param for local, param in spec.params.items() if param.name not in owned}
        owned |= {param.name for param in fresh.values()}
        slots = [
            Slot(
                local=local,
                spec=param,
                shape=shapes[local],
                blocks=_blocks(param, shapes[local], mesh, at, rules, padding),
                padding=_padding(param, shapes[local], mesh, at, rules, padding),
                start=0,
                is_partial=param.name in partial,
                is_narrow=param.name in narrow,
            )
            for local, param in fresh.items()
        ]
        families: dict[Family, list[Slot]] = {family: [] for family in FAMILIES}
        for slot in slots:
            families[_family(slot.spec, rules)].append(slot)
        layouts.append(tuple(_pack(family, members, mesh) for family, members in families.items() if members))
    return tuple(layouts)


def _family(spec: ParamSpec, rules: Rules) -> Family:
    if spec.packed is not None:
        return "packed"
    if spec.is_frozen:
        return "frozen"
    if spec.factor is not None:
        return "adapters"
    if spec.is_statistic:
        return "statistics"
    if spec.is_sparse:
        return "sparse"
    return "experts" if "ep" in map(rules.cut, spec.axes) else "dense"


def _parameters(spec: UnitSpec) -> list[tuple[str, nn.Parameter]]:
    with on_meta():
        return list(spec.build().named_parameters())


def is_cut(spec: UnitSpec, rules: Rules) -> bool:
    """Whether any parameter of a unit is cut over tp."""
    return any("tp" in map(rules.cut, param.axes) for param in spec.params.values())


def partial_names(
    specs: Sequence[UnitSpec], rules: Rules, *, sequence_parallel: bool, is_exact: bool = False
) -> frozenset[str]:
    """Whole parameters with gradients that are partial over tp, in every unit that reads them.

    Raises:
        ConfigError: one unit sees all tokens and another only its rank's.
    """
    partial: dict[str, bool] = {}
    for unit, spec in enumerate(specs):
        sees_part = sequence_parallel and (unit > 0 or not is_cut(spec, rules))
        for local, param in spec.params.items():
            is_partial = _is_partial(spec, local, rules, sees_part=sees_part, is_exact=is_exact)
            if partial.setdefault(param.name, is_partial) != is_partial:
                raise ConfigError(
                    f"{param.name} is whole and shared by units of which '{spec.name}' sees other tokens of a split "
                    "sequence than the first; set plan.sequence_parallel to false."
                )
    return frozenset(name for name, is_partial in partial.items() if is_partial)


def _is_partial(spec: UnitSpec, local: str, rules: Rules, *, sees_part: bool, is_exact: bool) -> bool:
    """Whether a tp rank has only a part of a parameter's gradient.

    Of a cut linear, one factor of an adapter is whole and multiplies the local part of the other: the rank's gradient
    then covers its own columns or rows, except in exact mode, which sums them at once.

    Routers and shared experts process their rank's tokens, and with a split sequence so do all whole layers; but a cut
    first unit has whole sequences. Whole layers inside the heads of a cut layer, such as norms of queries and keys,
    process their rank's heads.
    """
    axes = spec.params[local].axes
    if rules.cuts_any(axes):
        return False
    if (linear := linear_of(spec, local)) is not None and rules.cuts_any(linear.axes):
        return not is_exact
    if {"query_rank", "key_rank", "key_rank_rotated"} & set(axes):  # within the region of latent attention's heads
        return not is_exact and rules.cut("heads") == "tp"
    if sees_part or "router" in axes or "shared_ffn" in axes:
        return True
    beside = local.rpartition(".")[0].rpartition(".")[0]
    return "head_dim" in axes and any(
        rules.cuts_any(other.axes) for name, other in spec.params.items() if name.startswith(f"{beside}.")
    )


def linear_of(spec: UnitSpec, local: str) -> ParamSpec | None:
    """The weight of the linear that an adapter's factor belongs to; None for other parameters."""
    factor = spec.params[local].factor
    return None if factor is None else spec.params[f"{local.removesuffix(ENDS[factor])}.weight"]


def _pack(family: Family, slots: list[Slot], mesh: MeshShape) -> BufferLayout:
    # Those with narrow moments; then whole matrices, partial matrices, partial vectors, whole vectors.
    order = sorted(
        slots,
        key=lambda s: (not s.is_narrow, len(s.shape) < 2, s.is_partial if len(s.shape) > 1 else not s.is_partial),
    )
    packed: list[Slot] = []
    start = decayed = narrow = 0
    for slot in order:
        placed = replace(slot, start=start)
        packed.append(placed)
        start = placed.stop
        narrow = start if slot.is_narrow else narrow
        decayed = start if len(slot.shape) > 1 else decayed
    row_width = math.gcd(*(math.prod(slot.local_shape[1:]) for slot in slots)) if family == "sparse" else 0
    return BufferLayout(
        family=family,
        slots=tuple(packed),
        decayed=decayed,
        partial=_join_ranges([(slot.start, slot.stop) for slot in packed if slot.is_partial]),
        numel=start,
        padded=pad(start, mesh.shards(family) * (BLOCK // ALIGN if narrow else max(row_width, 1))),
        row_width=row_width,
        narrow=narrow,
    )


def _join_ranges(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending ranges, of which neighbours are one."""
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            low = joined.pop()[0]
        joined.append((low, high))
    return tuple(joined)


def cut(
    spec: ParamSpec,
    shape: tuple[int, ...],
    mesh: MeshShape,
    at: Coordinate,
    rules: Rules,
    padding: Sequence[tuple[str, int]] = (),
) -> tuple[slice, ...]:
    """The part of a global tensor on the rank at ``at``, before ZeRO. Of a padded one the last ranks hold fewer rows,
    or none.

    Raises:
        ConfigError: a dim does not split over the mesh axis that the rules give its logical axis.
    """
    places = {"tp": (mesh.tp, at.tp), "ep": (mesh.ep, mesh.expert_place(at)), None: (1, 0)}
    index = []
    for size, axis in zip(shape, spec.axes, strict=True):
        name = rules.cut(axis)
        degree, place = places[name]
        padded = dict(padding).get(axis or "", size)
        if padded % degree:
            raise ConfigError(f"{spec.name}: its dim '{axis}' of {size} does not split over plan.{name} = {degree}.")
        share = padded // degree
        index.append(slice(min(place * share, size), min((place + 1) * share, size)))
    return tuple(index)


def _blocks(
    spec: ParamSpec,
    shape: tuple[int, ...],
    mesh: MeshShape,
    at: Coordinate,
    rules: Rules,
    padding: Sequence[tuple[str, int]],
) -> tuple[tuple[slice, ...], ...]:
    """The part of each section of a global tensor on a rank: of a whole tensor one block."""
    if not spec.sections or mesh.tp == 1 or rules.cut(spec.axes[0]) is None:
        return (cut(spec, shape, mesh, at, rules, padding),)
    blocks, start = [], 0
    for size in spec.sections:
        rows, *others = cut(spec, (size, *shape[1:]), mesh, at, rules)
        blocks.append((slice(start + rows.start, start + rows.stop), *others))
        start += size
    return tuple(blocks)


def _padding(
    spec: ParamSpec,
    shape: tuple[int, ...],
    mesh: MeshShape,
    at: Coordinate,
    rules: Rules,
    padding: Sequence[tuple[str, int]],
) -> int:
    """Padding rows of a parameter on this rank."""
    rows = dict(padding)
    if not spec.axes or spec.axes[0] not in rows:
        return 0
    held = cut(spec, shape, mesh, at, rules, padding)[0]
    share = rows[spec.axes[0]] // (mesh.tp if rules.cut(spec.axes[0]) == "tp" else 1)
    return share - (int(held.stop) - int(held.start))
