"""Verify: the price of the program that a plan compiles to.

The seconds of each instruction are the catalogue's, and the program runs on the simulator's clock: so uneven stages,
the order of microbatches and overlap are those of the real step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superstep.cost.closed.estimate import Estimate
from superstep.cost.closed.memory import FRAGMENTATION
from superstep.cost.closed.parallel_degrees import Layout
from superstep.cost.program.memory.communicators import beyond_reserve
from superstep.cost.program.memory.gpu_kept import with_gpu_kept
from superstep.cost.program.memory.memory import RankBytes, rank_bytes
from superstep.cost.program.time.instruction_seconds import instruction_seconds
from superstep.cost.program.time.simulate import simulate
from superstep.cost.program.time.stragglers import Jitter, StragglerResult, straggle
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.planner.closed_form_seconds import KINDS, catalogue_seconds
from superstep.planner.plan_columns import run_config
from superstep.planner.price import Pricing
from superstep.planner.search import PricedPlan
from superstep.program import instructions as ins
from superstep.program.compile import compile_step
from superstep.program.instructions import Program

MOST_INSTRUCTIONS = 200_000
"""The most instructions of a simulated program; a larger one takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """A plan with the price of its program.

    Attributes:
        run: resolved, as it would train.
        parts: of the step on its busiest pipeline rank.
        memory: of its fullest rank, as the program allocates it.
        communicators_bytes: of its fullest rank, beyond what the search keeps free.
        memory_bytes: the program's memory with these, and the allocator's overhead.
        is_simulated: False where the program is too long, or the engine has none for the model; parts and memory are
        then those of the closed form.
    """

    priced: PricedPlan
    run: Resolved
    parts: Estimate
    memory: RankBytes | None
    communicators_bytes: int
    memory_bytes: float
    is_simulated: bool

    @property
    def step_s(self) -> float:
        return float(self.parts.step_s)


def verify(priced: PricedPlan) -> SimulatedPlan:
    """The price of a plan's program; raises ConfigError where the plan cannot be resolved."""
    problem = priced.side.problem
    run = resolve(run_config(priced.plan.plan_config(0, problem), problem), is_priced=True)
    run = run if problem.is_host else with_gpu_kept(run)
    beyond = 0 if problem.is_host else beyond_reserve(run.plan)
    if run.shape.is_priced_only or instructions_of(run) > MOST_INSTRUCTIONS:
        return SimulatedPlan(
            priced=priced,
            run=run,
            parts=priced.parts,
            memory=None,
            communicators_bytes=beyond,
            memory_bytes=priced.memory_bytes + beyond,
            is_simulated=False,
        )
    program = compile_step(run.plan, is_each_pass_checked=False)
    memory = max(rank_bytes(run, program), key=lambda rank: rank.bytes)
    return SimulatedPlan(
        priced=priced,
        run=run,
        parts=simulate_plan(run, program, priced.plan.layout, priced.side.pricing),
        memory=memory,
        communicators_bytes=beyond,
        memory_bytes=memory.bytes + FRAGMENTATION * memory.peak.bytes + beyond,
        is_simulated=True,
    )


def instructions_of(run: Resolved) -> int:
    """The approximate number of instructions of a step, all pipeline ranks together."""
    plan = run.plan
    passes = 2 + (plan.recompute == "full") + plan.schedule.startswith("zb")
    fetched = 4 if plan.shards_parameters and plan.mesh.data > 1 else 0
    summed = 2 if plan.shards_gradients and plan.mesh.data > 1 else 0
    return plan.microbatches * (len(plan.units) * (passes + fetched + summed) + 4 * len(plan.stages))


def simulate_plan(run: Resolved, program: Program, layout: Layout, pricing: Pricing) -> Estimate:
    """The parts of a step on its busiest pipeline rank, by the simulator."""
    source = catalogue_seconds(run, layout, pricing)
    durations = instruction_seconds(run, program, source)
    timeline = simulate(program, durations)
    spent = timeline.measure_uses()
    rank = max(range(program.pp), key=lambda r: spent[r].busy_s)
    of_kind = dict.fromkeys(KINDS, 0.0)
    update_s = settled_s = beside_s = 0.0
    for event in timeline.of(rank):
        seconds = event.end_s - event.start_s
        match event.instruction:
            case ins.Step():
                update_s += seconds
            case ins.Settle() | ins.Tie() | ins.ReducePartial():
                settled_s += seconds
            case ins.Fetch() | ins.Reduce() | ins.ReduceReplicas():
                beside_s += seconds
            case ins.Forward() | ins.Backward() | ins.BackwardInput() | ins.BackwardWeight() | ins.Recompute():
                for kind, units in source.kinds.items():
                    of_kind[kind] += units[event.instruction.unit].of(event.instruction)
    exposed = spent[rank].exposed_s
    waited_s = exposed["fetch"] + exposed["reduce"]
    # What runs beside compute slows it down, as the closed form has it.
    hidden = pricing.stack.overlap_shards if run.plan.shards_parameters else pricing.stack.overlap_data
    slowed_s = (1 - float(hidden)) * max(beside_s - waited_s, 0.0)
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


def simulate_stragglers(plan: SimulatedPlan, jitter: Jitter) -> StragglerResult | None:
    """A plan's late steps when chips differ; None where its program is too long to sample."""
    if not plan.is_simulated:
        return None
    program, mesh = compile_step(plan.run.plan, is_each_pass_checked=False), plan.run.plan.mesh
    source = catalogue_seconds(plan.run, plan.priced.plan.layout, plan.priced.side.pricing)
    took = instruction_seconds(plan.run, program, source)
    return straggle(program, took, jitter, lockstep=mesh.tp * mesh.cp, copies=mesh.dp)
