"""instruction_seconds: what each instruction of a step takes, whoever knows the seconds.

One pricer says which bytes an instruction moves and between which ranks. A ``InstructionPrices`` says what they take:
measured operations of this machine (``cost.program.time.predict``), or closed forms of a catalogue's chips
(``planner.closed_form_seconds``).

    instruction      bytes                                      over
    Fetch            parameters of a unit, by family            the shards of the family
    Reduce           gradients, by family                       the shards of the family
    ReduceReplicas   gradients / shards                         the copies
    Tie              this rank's share of a tied table          the pipeline ranks that hold it
    ReducePartial    gradients that a tp rank knows in part     tp
    Send, Recv       what passes to the unit                    two neighbours in the pipeline
    Settle, Step     this rank's share                          itself
    Snapshot         weights and moments of this rank's share   its host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from superstep.cost.program.buffers import FP32, family_numel, share_numel, zero_stage
from superstep.cost.program.flops import UnitParameters, rank_parameters
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds
from superstep.hardware.cluster import Collective
from superstep.plan.resolution.resolve import Resolved
from superstep.program.instructions import Program


@dataclass(frozen=True, slots=True)
class CollectiveRanks:
    """The ranks of a collective: how many there are, and how far apart neighbours are numbered."""

    count: int
    stride: int


class InstructionPrices(Protocol):
    """Where the seconds of a run come from."""

    @property
    def parameter_bytes(self) -> float:
        """Of an element, as it is gathered."""

    @property
    def gradient_bytes(self) -> float:
        """Of an element, as it is summed."""

    def passes(self, unit: int) -> UnitSeconds:
        """The passes of a unit over one microbatch; what runs beside them is left at 0."""

    def boundary_bytes(self, unit: int) -> float:
        """Of what passes to a unit on another pipeline rank."""

    def collective_s(self, collective: Collective, size: float, over: CollectiveRanks) -> float:
        """One collective of ``size`` bytes, as ``hardware.cluster.CollectiveRate`` counts them; 0 for one rank."""

    def settle_s(self, size: float) -> float:
        """To add the ``size`` bytes of a shard's new gradient to its sum."""

    def update_s(self, units: Sequence[UnitParameters]) -> float:
        """The optimizer's step on a rank that holds these units."""


def instruction_seconds(run: Resolved, program: Program, source: InstructionPrices) -> PerUnit:
    """Seconds of each instruction of the run's step."""
    owned = rank_parameters(run)
    held = [[owned[u] for u in program.held_by(rank)] for rank in range(program.pp)]
    tp = CollectiveRanks(run.plan.mesh.tp, 1)
    return PerUnit(
        units=tuple(_unit(run, program, source, unit, parameters) for unit, parameters in enumerate(owned)),
        reduce_partial_s=max(
            source.collective_s("all-reduce", FP32 * partial_elements(run, units), tp) for units in held
        ),
        # Every rank waits for the fullest one.
        step_s=max(source.update_s(units) for units in held),
    )


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
        fetch_s += source.collective_s("all-gather", source.parameter_bytes * elements, shards)
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


def partial_elements(run: Resolved, units: Sequence[UnitParameters]) -> int:
    """Elements on a rank whose gradient each tp rank sees only a part of: norms of heads; of a split sequence, all that
    is whole.
    """
    if run.config.lora is not None:
        return sum(unit.whole_factors if run.plan.sequence_parallel else unit.partial_factors for unit in units)
    if run.plan.sequence_parallel:
        return sum(unit.vectors + unit.whole for unit in units)
    if run.plan.rules.cut("heads") is None or run.decoder is None:
        return 0
    # Beside its norms of heads a block has two of the width, the head one. Routers and shared experts see their rank's
    # tokens.
    seen_in_part = sum(unit.whole for unit in units) if run.shape.moe else 0
    return seen_in_part + sum(max(unit.vectors - 2 * run.shape.width, 0) for unit in units)
