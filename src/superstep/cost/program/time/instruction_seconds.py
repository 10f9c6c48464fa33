"""instruction_seconds: the seconds of each instruction of a step, from any source of prices.

One pricer says which bytes an instruction moves and between which ranks. ``InstructionPrices`` gives their seconds:
measured operations of this machine (``cost.program.time.predict``), or closed forms of a catalogue's chips
(``planner.closed_form_seconds``).

    instruction      bytes                                      over
    Fetch            parameters of a unit, by family            the shards of the family
    Reduce           gradients, by family                       the shards of the family
    ReduceReplicas   gradients / shards                         the replicas
    Tie              this rank's share of a tied table          the pipeline ranks that hold it
    ReducePartial    partial gradients of a tp rank             tp
    Send, Recv       the unit's input                           two neighbours in the pipeline
    Settle, Step     this rank's share                          itself
    Snapshot         weights and moments of this rank's share   its host
    Offload, Reload  what the unit keeps of a microbatch        its host, or its disk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from superstep.cost.program.buffers import FP32, family_numel, share_numel, zero_stage
from superstep.cost.program.flops import UnitParameters, rank_parameters
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds
from superstep.hardware.cluster import Collective
from superstep.plan.config import Place
from superstep.plan.resolution.resolve import Resolved
from superstep.program.instructions import Forward, Program
from superstep.program.offload import list_moved
from superstep.program.peak_memory import UnitBytes


@dataclass(frozen=True, slots=True)
class CollectiveRanks:
    """The ranks of a collective: their number, and the distance of neighbours."""

    count: int
    stride: int


class InstructionPrices(Protocol):
    """The source of a run's seconds."""

    @property
    def parameter_bytes(self) -> float:
        """Bytes of a gathered parameter."""

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a summed gradient."""

    def passes(self, unit: int) -> UnitSeconds:
        """The passes of a unit over one microbatch; overlapped work is left at 0."""

    def boundary_bytes(self, unit: int) -> float:
        """Bytes of a unit's input from another pipeline rank."""

    def collective_s(self, collective: Collective, size: float, over: CollectiveRanks) -> float:
        """One collective of ``size`` bytes, counted as in ``hardware.cluster.CollectiveRate``; 0 for one rank."""

    def list_sizes(self) -> Sequence[UnitBytes]:
        """The transient bytes of each unit."""

    def move_s(self, place: Place, size: float, *, is_out: bool) -> float:
        """One copy between the device and a place."""

    def settle_s(self, size: float) -> float:
        """Adding the ``size`` bytes of a shard's new gradient to its sum."""

    def update_s(self, units: Sequence[UnitParameters]) -> float:
        """The optimizer's step on a rank that holds these units."""


def instruction_seconds(run: Resolved, program: Program, source: InstructionPrices) -> PerUnit:
    """Seconds of each instruction of the run's step."""
    owned = rank_parameters(run)
    held = [[owned[u] for u in program.list_held_units(rank) if u not in program.resting] for rank in range(program.pp)]
    tp = CollectiveRanks(run.plan.mesh.tp, 1)
    units = [_unit(run, program, source, unit, parameters) for unit, parameters in enumerate(owned)]
    for unit, size in count_moved(program, source.list_sizes()).items() if list_moved(program) else ():
        place = run.plan.activations[unit]
        units[unit] = replace(
            units[unit],
            offload_s=source.move_s(place, size, is_out=True),
            reload_s=source.move_s(place, size, is_out=False),
        )
    return PerUnit(
        units=tuple(units),
        selective=_list_selective(program) if run.plan.kept else frozenset(),
        reduce_partial_s=max(
            source.collective_s("all-reduce", FP32 * partial_elements(run, units), tp) for units in held
        ),
        # Every rank waits for the fullest one.
        step_s=max(source.update_s(units) for units in held),
    )


def _list_selective(program: Program) -> frozenset[tuple[int, int]]:
    passes = (i for instructions in program.ranks for i in instructions if isinstance(i, Forward))
    return frozenset((i.unit, i.microbatch) for i in passes if i.keep == "selective")


def _unit(run: Resolved, program: Program, source: InstructionPrices, unit: int, owned: UnitParameters) -> UnitSeconds:
    mesh = run.plan.mesh
    held = [(family, n) for family in run.plan.families if (n := family_numel(run, owned, family))]
    share = share_numel(run, owned)
    stage = mesh.tp * mesh.cp * mesh.dp
    holders = CollectiveRanks(len(program.holders(unit)), stage)
    fetch_s = reduce_s = replicas_s = 0.0
    for family, elements in held:
        shards = CollectiveRanks(mesh.shards(family), mesh.ep if family == "experts" else mesh.tp)
        copies = CollectiveRanks(mesh.replicas, shards.stride * shards.count)
        gradients = source.gradient_bytes * elements
        fetched = elements if family == "packed" else source.parameter_bytes * elements
        fetch_s += source.collective_s("all-gather", fetched, shards)
        if not run.plan.trains(family):
            continue
        reduce_s += source.collective_s(
            "reduce-scatter" if zero_stage(run, family).shards_optimizer else "all-reduce", gradients, shards
        )
        replicas_s += source.collective_s("all-reduce", gradients / shards.count, copies)
    return replace(
        source.passes(unit),
        fetch_s=fetch_s,
        reduce_s=reduce_s,
        settle_s=source.settle_s(FP32 * share) if zero_stage(run).shards_optimizer else 0.0,
        replicas_s=replicas_s,
        tie_s=source.collective_s("all-reduce", source.gradient_bytes * share, holders),
        # Three buffers are read and written: as many passes over memory as the settling of twice one.
        snapshot_s=source.settle_s(2 * FP32 * share) / (run.config.state.snapshot_every or 1),
        transfer_s=source.collective_s("send", source.boundary_bytes(unit), CollectiveRanks(2, stage)),
    )


def count_moved(program: Program, sizes: Sequence[UnitBytes]) -> dict[int, int]:
    """Bytes of a microbatch that each offloaded unit moves: what it keeps but fields of the batch."""
    moved, taken = list_moved(program), program.taken
    return {
        i.unit: sizes[i.unit].count_kept(i.keep)
        - sizes[i.unit].kept_input
        + sum(sizes[value].boundary for value in taken[i.unit])
        for instructions in program.ranks
        for i in instructions
        if isinstance(i, Forward) and (i.unit, i.microbatch) in moved
    }


def partial_elements(run: Resolved, units: Sequence[UnitParameters]) -> int:
    """Elements of a rank with partial gradients on each tp rank: norms of heads; all whole ones of a split sequence."""
    if run.config.lora is not None:
        return sum(unit.whole_factors if run.plan.sequence_parallel else unit.partial_factors for unit in units)
    if run.plan.sequence_parallel:
        return sum(unit.vectors + unit.whole for unit in units)
    if run.plan.rules.cut("heads") is None or run.decoder is None:
        return 0
    # Beside its norms of heads a block has two of the width, the head one. Routers and shared experts see their rank's
    # tokens.
    whole_elements = sum(unit.whole for unit in units) if run.shape.moe else 0
    return whole_elements + sum(max(unit.vectors - 2 * run.shape.width, 0) for unit in units)
