"""Figures: a plan's rates, days, energy, price, and limits."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.cost.closed.uncertainty import around, around_bytes
from superstep.cost.program.flops import model_flops_per_token
from superstep.cost.program.time.operation import Axis
from superstep.cost.program.time.traffic import traffic
from superstep.cost.program.time.unit_operations import decoder_operations
from superstep.plan.mesh import MeshShape
from superstep.planner.search_problem import SearchProblem
from superstep.planner.simulate_best import SimulatedPlan
from superstep.program.compile import compile_step

NEAR = 0.05
"""With a smaller share of free memory, recomputation counts as a limit by memory."""

PARTS = {
    "compute": "compute_s",
    "recomputation": "recompute_s",
    "tensor traffic": "tensor_s",
    "context traffic": "context_s",
    "expert traffic": "experts_s",
    "transfers between stages": "transfers_s",
    "data traffic": "data_s",
    "bubble": "bubble_s",
    "optimizer": "optimizer_s",
}
"""A name for each part of a step, in the order of a waterfall."""
TRAFFIC = ("tensor traffic", "context traffic", "expert traffic", "transfers between stages", "data traffic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A plan as a run.

    Attributes:
        step_interval_s: the step's 80% interval.
        mfu: model FLOP/s over the chips' peak, in the convention of ``cost.program.flops``.
        memory_interval_bytes: the memory's 80% interval.
        headroom_bytes: free memory.
        run_s: for all tokens; None where their number is unknown.
        energy_j: of the chips at their design power.
        run_interval_s, price_interval: 80% intervals.
    """

    step_s: float
    step_interval_s: tuple[float, float]
    tokens_per_s: float
    mfu: float
    memory_bytes: float
    memory_interval_bytes: tuple[float, float]
    headroom_bytes: float
    run_s: float | None
    energy_j: float | None
    price: float | None
    run_interval_s: tuple[float, float] | None
    price_interval: tuple[float, float] | None


def figures(
    plan: SimulatedPlan, tokens: float | None, price_per_chip_hour: float | None, *, narrowed: float = 1.0
) -> Figures:
    """The figures of a run of ``tokens``; ``narrowed``: the interval's remaining width after calibration."""
    problem = plan.priced.side.problem
    cluster = problem.cluster
    tokens_per_s = problem.batch_tokens / plan.step_s
    run_s = None if tokens is None else tokens / tokens_per_s
    power_w = cluster.chip.power_w
    interval = step_interval(plan, narrowed=narrowed)
    of_run = None if run_s is None else scale_interval(interval, run_s / plan.step_s)
    price = price_per_chip_hour if price_per_chip_hour is not None else cluster.price_per_chip_hour
    return Figures(
        step_s=plan.step_s,
        step_interval_s=interval,
        tokens_per_s=tokens_per_s,
        mfu=mfu(problem, tokens_per_s),
        memory_bytes=plan.memory_bytes,
        memory_interval_bytes=around_bytes(plan.memory_bytes),
        headroom_bytes=problem.memory_bytes - plan.memory_bytes,
        run_s=run_s,
        energy_j=None if run_s is None or power_w is None else run_s * power_w * cluster.chips,
        price=None if run_s is None or price is None else run_s / 3600 * price * cluster.chips,
        run_interval_s=of_run,
        price_interval=None
        if of_run is None or price is None
        else scale_interval(of_run, price * cluster.chips / 3600),
    )


def step_interval(plan: SimulatedPlan, *, narrowed: float = 1.0) -> tuple[float, float]:
    """The 80% interval of a plan's step, in seconds."""
    of = shares(plan)
    traffic = sum(of[name] for name in TRAFFIC)
    is_mixture = plan.priced.side.problem.shape.moe is not None
    return around(plan.step_s, traffic=traffic, is_mixture=is_mixture, narrowed=narrowed)


def scale_interval(interval: tuple[float, float], factor: float) -> tuple[float, float]:
    return interval[0] * factor, interval[1] * factor


def mfu(problem: SearchProblem, tokens_per_s: float) -> float:
    """Model FLOP/s over the peak of the problem's format."""
    peak = problem.cluster.chip.peak(problem.compute)
    assert peak is not None, "a problem's chip multiplies in its format"
    flops = model_flops_per_token(problem.shape, problem.sequence_tokens)
    return flops * tokens_per_s / (peak * problem.cluster.chips)


def shares(plan: SimulatedPlan) -> dict[str, float]:
    """Each part's share of the step, in the order of ``PARTS``."""
    return {name: float(getattr(plan.parts, field)) / plan.step_s for name, field in PARTS.items()}


def limits(plan: SimulatedPlan) -> list[tuple[str, float]]:
    """The largest parts of a step beside its compute, and memory where too little is free to recompute less."""
    held_back = [(name, share) for name, share in shares(plan).items() if name != "compute" and share >= 0.01]
    held_back.sort(key=lambda pair: -pair[1])
    if not held_back:
        return [("compute", shares(plan)["compute"])]
    problem = plan.priced.side.problem
    has_none = plan.memory_bytes > (1 - NEAR) * problem.memory_bytes
    if has_none and plan.run.plan.recompute != "none":
        held_back.append(("memory", plan.memory_bytes / problem.memory_bytes))
    return held_back[:3]


@dataclass(frozen=True, slots=True)
class AxisShare:
    """Bytes of a step's collectives and transfers over one axis, on one chip. ``link``: "fast links" where the axis
    stays in a domain, else "network".
    """

    axis: Axis
    bytes: int
    link: str


def list_carried_bytes(plan: SimulatedPlan) -> tuple[AxisShare, ...]:
    """Each axis' bytes on the pipeline rank with most, and their link; none for a long program."""
    if not plan.is_simulated:
        return ()
    run = plan.run
    program = compile_step(run.plan, is_each_pass_checked=False)
    most = max(traffic(run, program, decoder_operations(run)), key=lambda carried: sum(carried.values()))
    domain, reach = plan.priced.side.problem.cluster.domain, _reach(run.plan.mesh)
    return tuple(
        AxisShare(axis, size, "fast links" if reach[axis] <= domain else "network") for axis, size in most.items()
    )


def _reach(mesh: MeshShape) -> dict[Axis, int]:
    """Chips from the first to the last of a group: tensor-parallel ranks are neighbours, stages far apart."""
    return {
        "tp": mesh.tp,
        "cp": mesh.cp * mesh.tp,
        "sequence": mesh.cp * mesh.tp,
        "ep": mesh.ep,
        "shards": mesh.shards("dense") * mesh.tp,
        "replicas": mesh.dp * mesh.cp * mesh.tp,
        "pp": mesh.dp * mesh.cp * mesh.tp + 1,
        "tie": mesh.world,
        "world": mesh.world,
    }
