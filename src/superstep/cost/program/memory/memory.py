"""Memory: the bytes of each rank, by category, from the plan alone.

What stays from step to step are the flat buffers of a rank's units (``buffers``). The transient part is the peak of
``program.peak_memory``: what is kept while each instruction runs (``activations``) and that instruction's workspace
(``workspace``), the largest sum. A step's batch stays throughout.

Not counted: a collective's own buffers; the batch read ahead; torch itself; zero padding of exact mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superstep.cost.program.buffers import (
    ELEMENT_BYTES,
    FP32,
    count_held_numel,
    element_bytes,
    family_numel,
    gradient_bytes,
    is_exact,
    moment_bytes,
    zero_stage,
)
from superstep.cost.program.flops import UnitParameters, rank_parameters
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.temporaries import step_bytes
from superstep.plan.resolution.resolve import Resolved
from superstep.program.instructions import Program
from superstep.program.peak_memory import Peak, UnitBytes, high_water


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """A pipeline rank's bytes, on each of its dp and tp places.

    Attributes:
        params: parameters between steps; in fp32 with the master weights.
        gradients: gradient buffers between steps.
        optimizer: its moments, and master weights that are a copy.
        peak: the most transient bytes within a step.
        batch: a step's tokens and targets, and the tables of their positions.
        communicators: NCCL's, on a GPU, outside any allocator; 0 on a CPU, and where not requested.
    """

    params: int
    gradients: int
    optimizer: int
    peak: Peak
    batch: int = 0
    communicators: int = 0

    @property
    def bytes(self) -> int:
        """The rank's peak, all categories together."""
        stays = self.communicators + self.params + self.gradients + self.optimizer
        return stays + self.batch + self.peak.bytes


def rank_bytes(run: Resolved, program: Program, sizes: Sequence[UnitBytes] | None = None) -> tuple[RankBytes, ...]:
    """Each pipeline rank's memory for the step ``program``; ``sizes`` default to the formulas'."""
    owned = rank_parameters(run)
    peaks = high_water(program, unit_bytes(run) if sizes is None else sizes)
    return tuple(_rank(run, owned, program.list_held_units(rank), peak) for rank, peak in enumerate(peaks))


def weights_bytes(run: Resolved, program: Program) -> tuple[int, ...]:
    """Each pipeline rank's bytes of an untrained model of the same layout: its weights, without adapters' factors.
    Beside adapters they are the trainer's own, where each rank has these whole.
    """
    if run.config.lora is not None and not zero_stage(run, "frozen").shards_parameters:
        return (0,) * program.pp
    owned = rank_parameters(run)
    parts = []
    for rank in range(program.pp):
        held = 0
        for family in run.plan.families:
            ways = run.plan.mesh.shards(family) if run.plan.shards_parameters else 1
            if family != "adapters":
                numel = sum(family_numel(run, owned[u], family) // ways for u in program.list_held_units(rank))
                held += element_bytes(run, family) * numel
        parts.append(held)
    return tuple(parts)


def _rank(run: Resolved, owned: Sequence[UnitParameters], units: Sequence[int], peak: Peak) -> RankBytes:
    held = [owned[unit] for unit in units]
    has_blocks = run.decoder is not None and any(0 < unit < len(owned) - 1 for unit in units)
    params = gradients = optimizer = 0
    compute = run.config.numerics.compute
    for family in run.plan.families:
        sharding = zero_stage(run, family)
        whole = sum(family_numel(run, unit, family) for unit in held)
        share = sum(count_held_numel(run, unit, family) for unit in held)
        if not run.plan.trains(family):
            params += element_bytes(run, family) * (share if sharding.shards_parameters else whole)
            continue
        # Master weights of their own: wherever the compute dtype is not theirs. Else, with ZeRO 3, they are all there
        # is.
        is_copy, masters = compute != run.config.numerics.master, ELEMENT_BYTES[run.config.numerics.master] * share
        kept = 0 if sharding.shards_parameters else ELEMENT_BYTES[compute] * whole
        params += masters if sharding.shards_parameters and not is_copy else kept
        gradients += gradient_bytes(run) * (share if sharding.shards_gradients else whole)
        gradients += FP32 * share if is_exact(run) else 0
        optimizer += sum(moment_bytes(run, unit, family) for unit in held) + (masters if is_copy else 0)
    batch = step_bytes(run, has_blocks=has_blocks)
    return RankBytes(params=params, gradients=gradients, optimizer=optimizer, peak=peak, batch=batch)
