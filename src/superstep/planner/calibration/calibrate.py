"""Calibrate: fits the few shares that decide most of a step to one recorded step.

Each instruction's recorded seconds are compared with the formula's. The fit finds the logarithms x of factors on the
constants below, by least squares that prefer factors of 1:

    sum ((log predicted(x) - log recorded) / NOISE)² + sum (x / SPREAD)²

by Gauss-Newton steps. A constant on which no recorded instruction depends is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from superstep.cost.closed.efficiency import Efficiency, generation
from superstep.cost.program.time.instruction_seconds import instruction_seconds
from superstep.hardware.cluster import Cluster
from superstep.hardware.units import Array
from superstep.plan.resolution.resolve import Resolved
from superstep.planner.closed_form_seconds import catalogue_seconds
from superstep.planner.plan_columns import plans_of
from superstep.planner.price import pricing_of
from superstep.planner.search_problem import SearchProblem
from superstep.program.instructions import Instruction
from superstep.program.timeline import Timeline

NOISE = 0.1
"""Standard deviation of the logarithm of an instruction's recorded seconds."""
SPREAD = 0.7
"""Standard deviation of a factor's logarithm: twice or half is not unusual."""
FOREIGN = 20.0
"""A larger factor than between any two softwares on one chip: the run was on another chip."""
ROUNDS = 12
STEP = 1e-3
WAITING = ("Send", "Recv", "Step", "Tie", "Free", "ReducePartial", "Snapshot", "Offload", "Reload")
"""Instructions with recorded seconds that include waits for other ranks, or that belong to no unit."""
BESIDE = ("Fetch", "Reduce", "ReduceReplicas")
"""Instructions that wait for their lane: the shortest of a kind counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantChange:
    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The constants after one recorded step.

    Attributes:
        changes: of the constants on which the step depends.
        error_before, error_after: median deviation of an instruction's predicted seconds from its recorded ones.
    """

    efficiency: Efficiency
    changes: tuple[ConstantChange, ...]
    error_before: float
    error_after: float

    @property
    def foreign(self) -> tuple[ConstantChange, ...]:
        """Impossible changes."""
        return tuple(each for each in self.changes if not 1 / FOREIGN < each.after / each.before < FOREIGN)

    @property
    def is_believed(self) -> bool:
        """Whether to use the changed constants: they are near the old ones, and nearer to the step."""
        return not self.foreign and self.error_after < self.error_before


def names(cluster: Cluster, efficiency: Efficiency) -> tuple[str, ...]:
    """The constants that are fitted."""
    products = f"products.{generation(cluster.chip)}"
    return (
        products if products in efficiency.values else "products.other",
        "memory",
        "eager",
        "launch_s",
        "link",
        "network",
    )


def calibrate(run: Resolved, recorded: Timeline, cluster: Cluster, efficiency: Efficiency) -> Calibration:
    """The constants with the best fit to a recorded step of a run on chips of a cluster."""
    numerics = run.config.numerics.compute
    world = replace(cluster, chips=run.plan.mesh.world)
    problem = SearchProblem(base=run.config, cluster=world, compute=numerics, memory_bytes=0.0, efficiency=efficiency)
    observed = dict(_observe(recorded))
    known = names(cluster, efficiency)

    def logs(x: Array) -> Array:
        changed = efficiency.with_changes({n: efficiency[n] * float(np.exp(v)) for n, v in zip(known, x, strict=True)})
        pricing = pricing_of(replace(problem, efficiency=changed))
        seconds = instruction_seconds(run, recorded.program, catalogue_seconds(run, plans_of(run).layout, pricing))
        return np.log([max(seconds(instruction, rank), 1e-9) for instruction, rank in observed])

    wanted = np.log(np.maximum(list(observed.values()), 1e-9))
    x = _least_squares(lambda at: logs(at) - wanted, len(known))
    fitted = {name: efficiency[name] * float(np.exp(value)) for name, value in zip(known, x, strict=True)}
    return Calibration(
        efficiency=efficiency.with_changes(fitted),
        changes=tuple(
            ConstantChange(name=name, before=efficiency[name], after=value)
            for name, value in fitted.items()
            if abs(value / efficiency[name] - 1) > 1e-3
        ),
        error_before=_median_error(logs(np.zeros(len(known))) - wanted),
        error_after=_median_error(logs(x) - wanted),
    )


def _observe(recorded: Timeline) -> Iterator[tuple[tuple[Instruction, int], float]]:
    """One instruction of each kind, unit and rank, with its seconds."""
    groups: dict[tuple[str, int, int], list[tuple[Instruction, float]]] = {}
    for event in recorded.events:
        kind = type(event.instruction).__name__
        if kind not in WAITING:
            unit: int = getattr(event.instruction, "unit")  # noqa: B009
            groups.setdefault((kind, unit, event.rank), []).append((event.instruction, event.end_s - event.start_s))
    for (kind, _, rank), members in groups.items():
        seconds = [each for _, each in members]
        yield (members[0][0], rank), float(min(seconds) if kind in BESIDE else np.median(seconds))


def _least_squares(residual: Callable[[Array], Array], count: int) -> Array:
    x = np.zeros(count)
    prior = np.eye(count) / SPREAD
    for _ in range(ROUNDS):
        here = residual(x)
        slopes: Sequence[Array] = [(residual(x + STEP * unit) - here) / STEP for unit in np.eye(count)]
        matrix = np.vstack([np.stack(slopes, axis=1) / NOISE, prior])
        target = np.concatenate([-here / NOISE, -x / SPREAD])
        step = np.linalg.lstsq(matrix, target, rcond=None)[0]
        # Far from the answer the slopes mislead: no factor goes further than e in a round.
        x = x + np.clip(step, -1.0, 1.0)
    return x


def _median_error(deviation: Array) -> float:
    return float(np.median(np.abs(np.expm1(deviation))))
