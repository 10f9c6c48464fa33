"""predict: what a step of a plan would take on a machine, in seconds and bytes.

A unit takes what its operations take, one after the other: products and attention at the machine's rates for their
shapes, passes over memory, collectives. What the operations are is read off the unit's own modules
(``runtime.rehearsal.units``), or where there is no torch, from formulas (``cost.program.formulas``). Beside the units
there are, in fp32:

    Reduce, Fetch      reduce-scatter or all-reduce of a gradient buffer, gather of parameters, by family
    gradient buffer    written once where it comes and goes (ZeRO 2 and 3), at the start of the step else
    Settle             3 passes over the shard
    Step               the gradient's norm 1, AdamW 7 (28 bytes a parameter), with ZeRO 0 and bf16 the copy 2

Where ranks are processes of a host, what a forward pass keeps lies in memory that the system first has to find. Ranks
share the host's cores, and sending takes a core as computing does: no step is shorter than the work of all ranks,
sending included, over the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from superstep.cost.program.formulas import decoder_operations
from superstep.cost.program.machine import Machine, Prices, seconds
from superstep.cost.program.memory import (
    ELEMENT_BYTES,
    FP32,
    RankBytes,
    buffer_numel,
    family_numel,
    rank_bytes,
    share_numel,
    zero_stage,
)
from superstep.cost.program.operation import Axis, UnitOperations
from superstep.cost.program.simulate import PerUnit, UnitSeconds, simulate
from superstep.cost.program.work import UnitParameters, rank_parameters
from superstep.hardware.cluster import Collective
from superstep.plan.mesh import Family
from superstep.plan.resolve import Resolved
from superstep.program.compile import compile_step
from superstep.program.instructions import Program, Recv
from superstep.program.memory import UnitBytes
from superstep.program.timeline import Timeline

__all__ = ["Machine", "Prediction", "durations", "predict"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step before it has run.

    Attributes:
        timeline: what would run when.
        memory: of each pipeline rank.
    """

    timeline: Timeline
    memory: tuple[RankBytes, ...]

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.timeline.step_s

    @property
    def bubble(self) -> float:
        """Idle over busy time, all ranks together."""
        return self.timeline.bubble()

    @property
    def exposed_s(self) -> float:
        """Communication that no compute hides, mean over the ranks."""
        spent = self.timeline.spent()
        return sum(sum(s.exposed_s.values()) for s in spent) / len(spent)

    @property
    def memory_bytes(self) -> int:
        """The peak of the fullest rank."""
        return max(rank.bytes for rank in self.memory)


def predict(run: Resolved, machine: Prices, operations: Sequence[UnitOperations] | None = None) -> Prediction:
    """The training step of a run on a machine.

    Args:
        run: what would be trained.
        machine: what operations take.
        operations: of each unit as its own modules do them; None means those of the formulas.

    Raises:
        ConfigError: the model is the user's own, and no operations are given.
    """
    program = compile_step(run.plan)
    took = durations(run, program, machine, operations)
    timeline = simulate(program, took)
    if machine.shared_cores is not None:
        slower = _crowding(timeline, run.plan.mesh.world, machine.shared_cores)
        timeline = simulate(program, lambda i, rank: slower * took(i, rank)) if slower > 1 else timeline
    return Prediction(timeline, rank_bytes(run, program, sizes_of(run, operations)))


def sizes_of(run: Resolved, operations: Sequence[UnitOperations] | None) -> tuple[UnitBytes, ...] | None:
    """What units bring and drop, of a model of the user's own: as its operations were seen to keep it."""
    if run.decoder is not None or operations is None:
        return None
    e = ELEMENT_BYTES[run.config.numerics.compute]
    return tuple(
        UnitBytes(
            params=e * buffer_numel(run, unit),
            gradient=FP32 * buffer_numel(run, unit),
            kept_all=seen.kept_bytes,
            kept_selective=seen.kept_bytes,
            kept_input=seen.input_bytes,
            product_inputs=seen.between_bytes,
            product_gradients=0,
            boundary=seen.input_bytes,
        )
        for unit, seen in zip(rank_parameters(run), operations, strict=True)
    )


def _crowding(timeline: Timeline, world: int, cores: int) -> float:
    """By how much the step is longer because ranks share cores: all their work over all cores, if that is more."""
    work_s = sum(e.end_s - e.start_s for e in timeline.events if not isinstance(e.instruction, Recv))
    alike = world / timeline.program.pp
    return max(1.0, work_s * alike / cores / timeline.step_s) if timeline.step_s else 1.0


def durations(
    run: Resolved, program: Program, machine: Prices, operations: Sequence[UnitOperations] | None = None
) -> PerUnit:
    """Seconds of each instruction of the run's step; raises as ``predict`` does."""
    owned = rank_parameters(run)
    held = [[owned[u] for u in program.held_by(rank)] for rank in range(program.pp)]
    seen = decoder_operations(run) if operations is None else operations
    return PerUnit(
        units=tuple(_seconds(run, program, machine, unit, seen[unit]) for unit in range(len(owned))),
        reduce_partial_s=max(
            machine.collective_s("all-reduce", FP32 * partial_elements(run, units), run.plan.mesh.tp) for units in held
        ),
        # Every rank waits for the fullest one.
        step_s=max(_step_s(run, machine, units) for units in held),
    )


def _step_s(run: Resolved, machine: Prices, units: Sequence[UnitParameters]) -> float:
    shares = [FP32 * share_numel(run, unit) for unit in units]
    update_s = machine.pass_s("update", 7 * sum(shares)) + sum(machine.pass_s("read", size) for size in shares)
    if zero_stage(run) == 0 and run.config.numerics.compute != "fp32":
        update_s += machine.pass_s("copy", 1.5 * sum(shares))
    cleared = shares if zero_stage(run) >= 2 else [FP32 * buffer_numel(run, unit) for unit in units]
    return update_s + sum(machine.pass_s("write", size) for size in cleared)


def partial_elements(run: Resolved, units: Sequence[UnitParameters]) -> int:
    """Elements on a rank whose gradient each tp rank sees only a part of: norms of heads; of a split sequence, all that
    is whole.
    """
    if run.plan.sequence_parallel:
        return sum(unit.vectors + unit.whole for unit in units)
    if run.plan.rules.cut("heads") is None or run.decoder is None:
        return 0
    # Beside its norms of heads a block has two of the width, the head one. Routers and shared experts see their rank's
    # tokens.
    seen_in_part = sum(unit.whole for unit in units) if run.shape.moe else 0
    return seen_in_part + sum(max(unit.vectors - 2 * run.shape.width, 0) for unit in units)


def _ranks(run: Resolved) -> Callable[[Axis], int]:
    mesh = run.plan.mesh
    known: dict[Axis, int] = {
        "cp": mesh.cp,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "sequence": mesh.cp * mesh.tp,
        "world": mesh.world,
    }
    return known.__getitem__


def _new_memory_s(run: Resolved, machine: Prices, unit: int, seen: UnitOperations) -> tuple[float, float]:
    """What the pages take that a forward pass is the first to touch, and a recomputation.

    A host gives memory back once a backward pass has left it, so every forward finds its pages anew: those of what it
    keeps, and at the top, in the last unit, of all that it holds at once.
    """
    if machine.shared_cores is None:
        return 0.0, 0.0
    is_last = unit == len(run.plan.units) - 1
    kept_s = machine.pass_s("new", max(seen.kept_bytes - seen.input_bytes, seen.peak_bytes if is_last else 0))
    if run.plan.recompute == "full" and run.plan.recomputed[unit]:
        return machine.pass_s("new", seen.input_bytes), kept_s
    return kept_s, 0.0


def _seconds(run: Resolved, program: Program, machine: Prices, unit: int, seen: UnitOperations) -> UnitSeconds:
    mesh, e = run.plan.mesh, ELEMENT_BYTES[run.config.numerics.compute]
    owned, ranks = rank_parameters(run)[unit], _ranks(run)

    def over_families(take: Callable[[Family, int], float]) -> float:
        return sum(take(family, family_numel(run, owned, family)) for family in run.plan.families)

    def reduce_s(family: Family, numel: int) -> float:
        kind: Collective = "reduce-scatter" if zero_stage(run, family) else "all-reduce"
        return machine.collective_s(kind, FP32 * numel, mesh.shards(family)) if numel else 0.0

    def fetch_s(family: Family, numel: int) -> float:
        return machine.collective_s("all-gather", e * numel, mesh.shards(family)) if numel else 0.0

    def replicas_s(family: Family, numel: int) -> float:
        return machine.collective_s("all-reduce", FP32 * numel / mesh.shards(family), mesh.replicas) if numel else 0.0

    share = FP32 * share_numel(run, owned)
    # With ZeRO 2 and 3 a gradient buffer comes for each run of microbatches, and is written with zeros.
    cleared_s = machine.pass_s("write", FP32 * buffer_numel(run, owned)) if zero_stage(run) >= 2 else 0.0
    forward_s = seconds(seen.forward, machine, ranks)
    new_s, again_s = _new_memory_s(run, machine, unit, seen)
    return UnitSeconds(
        forward_s=forward_s + new_s,
        backward_s=seconds(seen.backward, machine, ranks) + cleared_s,
        weight_s=seconds(seen.weight, machine, ranks) + cleared_s,
        recompute_s=forward_s + again_s,
        fetch_s=over_families(fetch_s),
        reduce_s=over_families(reduce_s),
        settle_s=machine.pass_s("copy", 3 * share) if zero_stage(run) else 0.0,
        replicas_s=over_families(replicas_s),
        tie_s=machine.collective_s("all-reduce", share, len(program.holders(unit))),
        transfer_s=machine.collective_s("send", seen.input_bytes, 2),
    )
