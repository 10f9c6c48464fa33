"""Verify: the price of the program that a plan compiles to.

The seconds of each instruction come from the formulas of the closed form, and the program runs on the simulator's
clock: uneven stages, the order of microbatches and what hides behind what are then those of the step that will run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from superstep.cost.closed.block import E, Seconds, block_seconds
from superstep.cost.closed.decoder_size import Array
from superstep.cost.closed.estimate import Estimate, embedding_s, head_s
from superstep.cost.closed.footprint import FRAGMENTATION
from superstep.cost.closed.layout import Layout
from superstep.cost.program.memory import (
    FP32,
    RankBytes,
    buffer_numel,
    family_numel,
    has_fused_loss,
    rank_bytes,
    zero_stage,
)
from superstep.cost.program.simulate import PerUnit, UnitSeconds, simulate
from superstep.cost.program.straggle import Jitter, Straggled, straggle
from superstep.cost.program.work import UnitParameters, rank_parameters
from superstep.hardware.collectives import Group, all_reduce_s, gather_s, send_s
from superstep.plan.mesh import FAMILIES, Family
from superstep.plan.resolve import Resolved, resolve
from superstep.planner.plans import run_config
from superstep.planner.price import Pricing
from superstep.planner.search import Found
from superstep.program.compile import compile_step
from superstep.program.instructions import Program

MOST_INSTRUCTIONS = 200_000
"""Of a program that is simulated; a larger one takes minutes."""

KINDS = ("compute", "again", "tensor", "context", "experts")
"""What the seconds of a pass are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A plan with the price of its program.

    Attributes:
        run: resolved, as it would train.
        parts: of the step on its busiest pipeline rank.
        memory: of its fullest one, as the program allocates it.
        memory_bytes: that with what an allocator holds besides, or the closed form's where it is larger: it has what an
            instruction makes and drops.
        is_simulated: False where the program is too long; parts and memory are then the closed form's.
    """

    found: Found
    run: Resolved
    parts: Estimate
    memory: RankBytes | None
    memory_bytes: float
    is_simulated: bool

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return float(self.parts.step_s)


def verified(found: Found) -> Verified:
    """The price of a plan's program; raises ConfigError where the plan cannot be resolved."""
    problem = found.side.problem
    run = resolve(run_config(found.plan.plan_config(0, problem), problem))
    if instructions_of(run) > MOST_INSTRUCTIONS:
        return Verified(
            found=found,
            run=run,
            parts=found.parts,
            memory=None,
            memory_bytes=found.memory_bytes,
            is_simulated=False,
        )
    program = compile_step(run.plan, is_each_pass_checked=False)
    memory = max(rank_bytes(run, program), key=lambda rank: rank.bytes)
    return Verified(
        found=found,
        run=run,
        parts=simulated(run, program, found.plan.layout, found.side.pricing),
        memory=memory,
        memory_bytes=max(memory.bytes + FRAGMENTATION * memory.peak.bytes, found.memory_bytes),
        is_simulated=True,
    )


def instructions_of(run: Resolved) -> int:
    """About how many instructions a step has, all pipeline ranks together."""
    plan = run.plan
    passes = 2 + (plan.recompute == "full") + plan.schedule.startswith("zb")
    fetched = 4 if plan.zero == 3 and plan.mesh.data > 1 else 0
    summed = 2 if plan.zero >= 2 and plan.mesh.data > 1 else 0
    return plan.microbatches * (len(plan.units) * (passes + fetched + summed) + 4 * len(plan.stages))


def simulated(run: Resolved, program: Program, layout: Layout, pricing: Pricing) -> Estimate:
    """The parts of a step on its busiest pipeline rank, as the simulator's clock has it."""
    durations = _Durations(run, program, layout, pricing)
    timeline = simulate(program, durations.whole)
    spent = timeline.spent()
    rank = max(range(program.pp), key=lambda r: spent[r].busy_s)
    of_kind = dict.fromkeys(KINDS, 0.0)
    update_s = settled_s = beside_s = 0.0
    for event in timeline.of(rank):
        seconds = event.end_s - event.start_s
        match type(event.instruction).__name__:
            case "Step":
                update_s += seconds
            case "Settle":
                settled_s += seconds
            case "Fetch" | "Reduce" | "ReduceReplicas":
                beside_s += seconds
            case "Forward" | "Backward" | "BackwardInput" | "BackwardWeight" | "Recompute":
                for kind, part in durations.parts.items():
                    of_kind[kind] += part(event.instruction, rank)
    exposed = spent[rank].exposed_s
    waited_s = exposed["fetch"] + exposed["reduce"]
    # What runs beside compute slows it down, as the closed form has it.
    hidden = pricing.stack.overlap_shards if run.plan.zero == 3 else pricing.stack.overlap_data
    slowed_s = (1 - _number(hidden)) * max(beside_s - waited_s, 0.0)
    values = {
        "compute_s": of_kind["compute"],
        "recompute_s": of_kind["again"],
        "tensor_s": of_kind["tensor"],
        "context_s": of_kind["context"],
        "experts_s": of_kind["experts"],
        "transfers_s": exposed["act"] + exposed["grad"],
        "data_s": waited_s + slowed_s + settled_s,
        "bubble_s": spent[rank].bubble_s,
        "optimizer_s": update_s,
    }
    return Estimate(**{name: np.asarray(seconds) for name, seconds in values.items()})


def instruction_seconds(run: Resolved, program: Program, layout: Layout, pricing: Pricing) -> PerUnit:
    """The seconds of each instruction of a run's step."""
    return _Durations(run, program, layout, pricing).whole


def straggled(plan: Verified, jitter: Jitter) -> Straggled | None:
    """How late a plan's steps come when chips are not all alike; None where its program is too long to sample."""
    if not plan.is_simulated:
        return None
    program, mesh = compile_step(plan.run.plan, is_each_pass_checked=False), plan.run.plan.mesh
    took = instruction_seconds(plan.run, program, plan.found.plan.layout, plan.found.side.pricing)
    return straggle(program, took, jitter, lockstep=mesh.tp * mesh.cp, copies=mesh.dp)


class _Durations:
    """Seconds of each instruction of one plan's step; ``parts`` splits those of the passes."""

    def __init__(self, run: Resolved, program: Program, layout: Layout, pricing: Pricing) -> None:
        self.run, self.layout, self.pricing = run, layout, pricing
        is_mixture = run.shape.moe is not None
        block = block_seconds(pricing.model, layout, pricing.rates, pricing.stack, is_mixture=is_mixture)
        layers, owned = run.shape.layers, rank_parameters(run)
        ends = self._embedding(), self._head()
        passes = {kind: [ends[0][kind], *[self._block(block)[kind]] * layers, ends[1][kind]] for kind in KINDS}
        self.parts = {kind: PerUnit(units=tuple(units)) for kind, units in passes.items()}
        held = [sum(self._held(owned[u]) for u in program.held_by(rank)) for rank in range(program.pp)]
        beside = [self._beside(unit, len(program.holders(number))) for number, unit in enumerate(owned)]
        self.whole = PerUnit(
            units=tuple(_sum([*each, data]) for *each, data in zip(*passes.values(), beside, strict=True)),
            # AdamW reads and writes about 30 bytes for each of its numbers; all ranks wait for the fullest.
            step_s=max(30.0 * numel for numel in held) / float(pricing.rates.memory_bytes_per_s),
        )

    def _block(self, block: Seconds) -> dict[str, UnitSeconds]:
        """Traffic of the backward pass is that of the forward pass; of context parallelism twice as much."""
        forward, again = _number(block.forward_s), _number(block.attention_s)
        tensor, context, experts = map(_number, (block.tensor_s, block.context_s, block.experts_s))
        is_selective = self.run.plan.recompute == "selective"
        return {
            "compute": UnitSeconds(
                forward_s=forward, backward_s=_number(block.backward_s), weight_s=_number(block.weight_s)
            ),
            "again": UnitSeconds(forward_s=0.0, backward_s=again if is_selective else 0.0, recompute_s=forward),
            "tensor": UnitSeconds(forward_s=tensor, backward_s=tensor, recompute_s=tensor),
            "context": UnitSeconds(forward_s=context, backward_s=2 * context, recompute_s=context),
            "experts": UnitSeconds(forward_s=experts, backward_s=experts, recompute_s=experts),
        }

    def _embedding(self) -> dict[str, UnitSeconds]:
        seconds = _number(embedding_s(self.pricing.model, self.layout, self.pricing.rates))
        return _only_compute(UnitSeconds(forward_s=seconds / 3, backward_s=seconds * 2 / 3, weight_s=seconds * 2 / 3))

    def _head(self) -> dict[str, UnitSeconds]:
        pricing = self.pricing
        whole = _number(head_s(pricing.model, self.layout, pricing.rates, pricing.stack))
        if has_fused_loss(self.run):
            # The gradient is made in the forward pass.
            return _only_compute(UnitSeconds(forward_s=whole, backward_s=0.0))
        return _only_compute(UnitSeconds(forward_s=whole / 3, backward_s=whole * 2 / 3, weight_s=whole / 3))

    def _held(self, unit: UnitParameters) -> float:
        """Numbers of a unit that one rank updates."""
        mesh = self.run.plan.mesh
        return sum(
            family_numel(self.run, unit, family) / (mesh.shards(family) if zero_stage(self.run, family) else 1)
            for family in FAMILIES
        )

    def _beside(self, unit: UnitParameters, holders: int) -> UnitSeconds:
        """What runs beside the passes of a unit: its parameters and gradients, and its input's way to another rank."""
        run, links = self.run, self.pricing.rates.links
        plan, stack = run.plan, self.pricing.stack
        gradient = float(stack.gradient_bytes)

        def each(seconds: Callable[[float, Family], Array]) -> float:
            return sum(
                _number(seconds(float(numel), family))
                for family in FAMILIES
                if (numel := family_numel(run, unit, family)) and plan.mesh.sharers(family) > 1
            )

        tokens = plan.microbatch * run.config.data.sequence_tokens / plan.mesh.cp
        stream = E * tokens * run.shape.width / (plan.mesh.tp if plan.sequence_parallel else 1)
        far = plan.mesh.tp * plan.mesh.cp * plan.mesh.dp
        tie = gradient * buffer_numel(run, unit) / (plan.mesh.shards("dense") if zero_stage(run) else 1)
        moved = 3 * FP32 * self._held(unit) / float(self.pricing.rates.memory_bytes_per_s)
        return UnitSeconds(
            forward_s=0.0,
            backward_s=0.0,
            fetch_s=each(lambda numel, family: gather_s(np.asarray(E * numel), self._group(family), links)),
            reduce_s=each(
                lambda numel, family: (gather_s if zero_stage(run, family) else all_reduce_s)(
                    np.asarray(gradient * numel), self._group(family), links
                )
            ),
            settle_s=moved if zero_stage(run) else 0.0,
            replicas_s=each(
                lambda numel, family: all_reduce_s(
                    np.asarray(gradient * numel / plan.mesh.shards(family)), self._copies(family), links
                )
            ),
            tie_s=_number(all_reduce_s(np.asarray(tie), _group(holders, far), links)) if holders > 1 else 0.0,
            transfer_s=_number(send_s(np.asarray(stream), np.asarray(float(far)), links)),
        )

    def _group(self, family: Family) -> Group:
        """The ranks that share out one copy of a family's parameters."""
        return _group(self.run.plan.mesh.shards(family), self._stride(family))

    def _copies(self, family: Family) -> Group:
        mesh = self.run.plan.mesh
        return _group(mesh.replicas, self._stride(family) * mesh.shards(family))

    def _stride(self, family: Family) -> int:
        mesh = self.run.plan.mesh
        return mesh.tp if family == "dense" else mesh.ep


def _group(ranks: int, stride: int) -> Group:
    return Group(np.asarray(float(ranks)), np.asarray(float(stride)))


def _only_compute(seconds: UnitSeconds) -> dict[str, UnitSeconds]:
    nothing = UnitSeconds(forward_s=0.0, backward_s=0.0)
    return {kind: seconds if kind == "compute" else nothing for kind in KINDS}


def _sum(parts: list[UnitSeconds]) -> UnitSeconds:
    return UnitSeconds(
        **{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(UnitSeconds)}
    )


def _number(value: Array) -> float:
    return float(np.asarray(value).reshape(-1)[0])
