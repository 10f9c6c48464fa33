"""predict: the seconds and bytes of a plan's step on a machine.

A unit takes the sum of its operations: products and attention at the machine's rates for their shapes, passes over
memory, collectives. The operations are traced from the unit's modules (``engine.tracing.trace_units``), or without
torch computed by formulas (``unit_operations``). Beside the units there are, in fp32:

    Reduce, Fetch      reduce-scatter or all-reduce of a gradient buffer, gather of parameters, by family
    gradient buffer    written once where it is transient (ZeRO 2 and 3), at the start of the step else
    Settle             3 passes over the shard
    Step               the gradient's norm 1, AdamW 7 (28 bytes a parameter), Lion 5, with ZeRO 0 and bf16 the copy 2

Where ranks are processes of a host, the last unit's memory must first be allocated by the system. Ranks share the
host's cores, and sending takes a core as computing does: no step is shorter than the work of all ranks, with sending,
over the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from superstep.cost.program.buffers import (
    ELEMENT_BYTES,
    FP32,
    count_fetched_bytes,
    count_settled_numel,
    gradient_bytes,
    gradient_numel,
    has_fused_loss,
    share_numel,
    zero_stage,
)
from superstep.cost.program.flops import UnitParameters, rank_parameters
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory import RankBytes, rank_bytes
from superstep.cost.program.time.instruction_seconds import CollectiveRanks, instruction_seconds
from superstep.cost.program.time.op_prices import MachineRates, Prices, seconds
from superstep.cost.program.time.operation import Axis, UnitOperations, count_value_bytes
from superstep.cost.program.time.simulate import Durations, PerUnit, UnitSeconds, simulate
from superstep.cost.program.time.unit_operations import decoder_operations
from superstep.hardware.cluster import Collective
from superstep.plan.config import Place
from superstep.plan.optimizers import update_passes
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Forward, Program, Recv
from superstep.program.peak_memory import UnitBytes
from superstep.program.timeline import Timeline

__all__ = ["MachineRates", "Prediction", "durations", "predict"]


SELECTIVE_S = 3e-3
"""What torch's selective checkpoint takes beside the operations, for each unit and microbatch: every operation of both
passes goes through Python. 1.4 to 4.8 ms were seen for a block, on a busy AMD EPYC.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted step.

    Attributes:
        timelines: of each phase of the step, in their order.
        memory: of each pipeline rank, in the phase that needs most.
        before_s: of the pass before it, in which a loss of whole answers finds its tokens' weights.
    """

    timelines: tuple[Timeline, ...]
    memory: tuple[RankBytes, ...]
    before_s: float = 0.0

    @property
    def timeline(self) -> Timeline:
        """Of the first phase."""
        return self.timelines[0]

    @property
    def step_s(self) -> float:
        return self.before_s + sum(timeline.step_s for timeline in self.timelines)

    @property
    def bubble(self) -> float:
        phases_s = [timeline.step_s for timeline in self.timelines]
        idle_s = sum(timeline.bubble() * s for timeline, s in zip(self.timelines, phases_s, strict=True))
        return idle_s / sum(phases_s) if sum(phases_s) else 0.0

    @property
    def exposed_s(self) -> float:
        """Communication that no compute hides, mean over the ranks."""
        spent = [s for timeline in self.timelines for s in timeline.measure_uses()]
        return sum(sum(s.exposed_s.values()) for s in spent) / len(self.memory)

    @property
    def memory_bytes(self) -> int:
        return max(rank.bytes for rank in self.memory)


def predict(
    run: Resolved,
    machine: Prices,
    operations: Sequence[UnitOperations] | None = None,
    *,
    is_weighed: bool = False,
) -> Prediction:
    """The training step of a run on a machine.

    Args:
        operations: of each unit, traced from its modules, for one phase of the step after the other; None means those
            of the formulas.
        is_weighed: whether each step first computes the log-probabilities of its batch.

    Raises:
        ConfigError: a user's model without operations.
    """
    timelines, before_s = [], 0.0
    for phase, its_operations in pair_phases(run, operations):
        program = compile_step(phase.plan)
        took = durations(phase, program, machine, its_operations)
        timelines.append(_share_cores(phase, machine, program, took))
        if is_weighed:
            before_s = _share_cores(run, machine, compile_evaluation(run.plan), _without_gradients(run, took)).step_s
    return Prediction(tuple(timelines), memory_of_phases(run, operations), before_s)


def pair_phases(
    run: Resolved, operations: Sequence[UnitOperations] | None
) -> list[tuple[Resolved, Sequence[UnitOperations] | None]]:
    """The run of each phase of a step, with the operations of its units: one phase of ``operations`` after another."""
    units = len(run.plan.units)
    return [
        (phase, None if operations is None else operations[number * units : (number + 1) * units])
        for number, phase in enumerate(run.list_phases())
    ]


def memory_of_phases(run: Resolved, operations: Sequence[UnitOperations] | None) -> tuple[RankBytes, ...]:
    """The memory of each pipeline rank, in the phase that needs most."""
    each = [
        rank_bytes(phase, compile_step(phase.plan), sizes_of(phase, its_operations))
        for phase, its_operations in pair_phases(run, operations)
    ]
    return tuple(max(of_rank, key=lambda rank: rank.bytes) for of_rank in zip(*each, strict=True))


def _share_cores(run: Resolved, machine: Prices, program: Program, took: Durations) -> Timeline:
    """A program on a clock, slower where ranks share cores."""
    timeline = simulate(program, took)
    if machine.shared_cores is None:
        return timeline
    slower = _crowding(timeline, run.plan.mesh.world, machine.shared_cores)
    return simulate(program, lambda i, rank: slower * took(i, rank)) if slower > 1 else timeline


def _without_gradients(run: Resolved, took: Durations) -> Durations:
    """Where a head computes its gradients in its forward pass, a third of its products are the logits."""
    last = len(run.plan.units) - 1
    share = 1 / 3 if run.decoder is not None and has_fused_loss(run) else 1.0
    return lambda i, rank: took(i, rank) * (share if isinstance(i, Forward) and i.unit == last else 1.0)


def sizes_of(run: Resolved, operations: Sequence[UnitOperations] | None) -> tuple[UnitBytes, ...] | None:
    """Units' bytes for a user's model, as traced from its operations."""
    if run.decoder is not None or operations is None:
        return None
    values = [count_value_bytes(operations, value) for value in range(len(operations))]
    return tuple(
        UnitBytes(
            params=count_fetched_bytes(run, unit),
            gradient=gradient_bytes(run) * count_settled_numel(run, unit),
            kept_all=operation.kept_bytes,
            kept_selective=operation.kept_bytes,
            kept_input=operation.input_bytes,
            product_inputs=operation.between_bytes,
            product_gradients=0,
            boundary=value_bytes,
            forward_workspace=max(
                operation.input_bytes + operation.peak_bytes - operation.kept_bytes - output_bytes, 0
            ),
            backward_workspace=operation.backward_peak_bytes,
            input_workspace=operation.backward_peak_bytes,
        )
        for unit, operation, value_bytes, output_bytes in zip(
            rank_parameters(run), operations, values, [*values[1:], 0], strict=True
        )
    )


def _crowding(timeline: Timeline, world: int, cores: int) -> float:
    """How many times longer the step is because ranks share cores: all their work over all cores, if that is more."""
    work_s = sum(e.end_s - e.start_s for e in timeline.events if not isinstance(e.instruction, Recv))
    alike = world / timeline.program.pp
    return max(1.0, work_s * alike / cores / timeline.step_s) if timeline.step_s else 1.0


def durations(
    run: Resolved, program: Program, machine: Prices, operations: Sequence[UnitOperations] | None = None
) -> PerUnit:
    """Seconds of each instruction of the run's step; raises like ``predict``."""
    return instruction_seconds(run, program, price_operations(run, machine, operations))


def price_operations(
    run: Resolved, machine: Prices, operations: Sequence[UnitOperations] | None = None
) -> OperationDurations:
    """The source of a run's seconds on a machine; raises like ``predict``."""
    units = decoder_operations(run) if operations is None else operations
    if run.plan.recompute == "auto" and run.decoder is not None and operations is not None:
        units = [replace(unit, again=own.again) for unit, own in zip(operations, decoder_operations(run), strict=True)]
    return OperationDurations(run, machine, tuple(units))


@dataclass(frozen=True, slots=True)
class OperationDurations:
    """``InstructionPrices`` from the operations of the units, each at a machine's price."""

    run: Resolved
    machine: Prices
    operations: tuple[UnitOperations, ...]

    @property
    def parameter_bytes(self) -> float:
        return ELEMENT_BYTES[self.run.config.numerics.compute]

    @property
    def gradient_bytes(self) -> float:
        """Gradients are fp32, and integers in exact mode."""
        return gradient_bytes(self.run)

    def passes(self, unit: int) -> UnitSeconds:
        run, machine, operations = self.run, self.machine, self.operations[unit]
        ranks = _ranks(run)
        # With ZeRO 2 and 3 a gradient buffer comes for each run of microbatches, and is written with zeros.
        is_new = zero_stage(run).shards_gradients
        cleared = gradient_bytes(run) * gradient_numel(run, rank_parameters(run)[unit])
        cleared_s = machine.pass_s("write", cleared) if is_new else 0.0
        forward_s = seconds(operations.forward, machine, ranks)
        return UnitSeconds(
            forward_s=forward_s,
            backward_s=seconds(operations.backward, machine, ranks) + cleared_s,
            weight_s=seconds(operations.weight, machine, ranks) + cleared_s,
            again_s=seconds(operations.again, machine, ranks) + SELECTIVE_S if operations.again else 0.0,
            recompute_s=forward_s,
        )

    def boundary_bytes(self, unit: int) -> float:
        return count_value_bytes(self.operations, unit)

    def collective_s(self, collective: Collective, size: float, over: CollectiveRanks) -> float:
        """At the machine's price, which depends only on the number of ranks."""
        return self.machine.collective_s(collective, size, over.count) if size else 0.0

    def list_sizes(self) -> Sequence[UnitBytes]:
        return sizes_of(self.run, self.operations) or unit_bytes(self.run)

    def move_s(self, place: Place, size: float, *, is_out: bool) -> float:
        return self.machine.move_s(place, size, is_out=is_out)

    def settle_s(self, size: float) -> float:
        """Two reads and a write."""
        return self.machine.pass_s("copy", 3 * size)

    def update_s(self, units: Sequence[UnitParameters]) -> float:
        """The gradient's norm, the update, the copy for computing, and zeros for the next step."""
        run, machine = self.run, self.machine
        shares = [FP32 * share_numel(run, unit) for unit in units]
        update_s = machine.pass_s(
            "update", update_passes(run.config.train.optimizer, run.config.train.moments) * sum(shares)
        )
        update_s += sum(machine.pass_s("read", size) for size in shares)
        if not zero_stage(run).shards_optimizer and run.config.numerics.compute != "fp32":
            update_s += machine.pass_s("copy", 1.5 * sum(shares))
        cleared = (
            shares
            if zero_stage(run).shards_gradients
            else [self.gradient_bytes * gradient_numel(run, unit) for unit in units]
        )
        return update_s + sum(machine.pass_s("write", size) for size in cleared)


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
