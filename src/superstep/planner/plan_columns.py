"""Plans: many layouts of one run, a column for each field."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import get_args

import numpy as np
import numpy.typing as npt

from superstep.cost.closed.parallel_degrees import RECOMPUTE, SCHEDULES, Layout
from superstep.hardware.units import Array
from superstep.plan.config import Context, PlanConfig, Recompute, RunConfig, Schedule
from superstep.plan.resolution.resolve import Resolved
from superstep.planner.search_problem import SearchProblem

CONTEXT: tuple[Context, ...] = get_args(Context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Columns of one length; names and meanings are those of ``PlanConfig``.

    Attributes:
        context, schedule, recompute: indices into ``CONTEXT``, ``SCHEDULES`` and ``RECOMPUTE``.
        microbatch_group: 0 where the schedule has none.
        microbatches: of one data-parallel rank in a step.
        layers: of the model.
    """

    pp: Array
    dp: Array
    cp: Array
    tp: Array
    ep: Array
    sequence_parallel: Array
    context: Array
    microbatch: Array
    microbatches: Array
    recompute: Array
    schedule: Array
    chunks: Array
    microbatch_group: Array
    zero: Array
    replicas: Array
    layers: Array
    prefetch: Array

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def layout(self) -> Layout:
        """The layout for the closed forms of ``cost``.

        The program sums gradients once for each run of microbatches through a stage, and gathers parameters once where
        it keeps the whole stage beside the next unit: a stage of two units, for example.
        """
        has_runs = (self.schedule == SCHEDULES.index("breadth-first")) & (self.chunks > 1)
        run = np.where(has_runs, self.microbatch_group, 1.0)
        is_kept = (self.layers + 2) / (self.pp * self.chunks) <= 1 + self.prefetch
        runs_kept = np.where(is_kept, run, 1.0)
        return Layout(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            shards=self.dp * self.cp / self.replicas,
            zero=self.zero,
            sequence_parallel=self.sequence_parallel,
            chunks=self.chunks,
            schedule=self.schedule,
            microbatch=self.microbatch,
            microbatches=self.microbatches,
            recompute=self.recompute,
            recomputed_layers=np.ones(1),
            # The engine keeps the optimizer's state on its device.
            offload=np.zeros(1),
            group=np.where(self.schedule == SCHEDULES.index("gpipe"), self.microbatches, self.microbatch_group),
            gathers=np.where(self.zero >= 3, 2 * self.microbatches / runs_kept, 1.0),
            reductions=np.where(self.zero >= 2, self.microbatches / run, 1.0),
            is_ulysses=self.context,
        )

    @property
    def mesh(self) -> Array:
        """A number for each mesh; equal meshes have equal numbers."""
        return ((self.pp * 2.0**20 + self.cp) * 2.0**9 + self.tp) * 2.0**12 + self.ep

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Plans:
        """Some of them."""
        return Plans(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def plan_config(self, row: int, problem: SearchProblem) -> PlanConfig:
        """One of them as a ``[plan]``."""

        def whole(name: str) -> int:
            return int(getattr(self, name)[row])

        return PlanConfig(
            pp=whole("pp"),
            dp=whole("dp"),
            cp=whole("cp"),
            tp=whole("tp"),
            ep=whole("ep"),
            zero=whole("zero"),
            replicas=whole("replicas"),
            context=CONTEXT[int(self.context[row])],
            schedule=schedule_of(int(self.schedule[row])),
            chunks=whole("chunks"),
            microbatch=whole("microbatch"),
            microbatch_group=whole("microbatch_group") or None,
            recompute=recompute_of(int(self.recompute[row])),
            sequence_parallel=bool(self.sequence_parallel[row]),
            prefetch=problem.base.plan.prefetch,
        )


def schedule_of(index: int) -> Schedule:
    """The engine's schedule at an index of ``SCHEDULES``."""
    known: dict[str, Schedule] = {name: name for name in get_args(Schedule)}
    return known[SCHEDULES[index]]


def recompute_of(index: int) -> Recompute:
    """The policy at an index of ``RECOMPUTE``."""
    known: dict[str, Recompute] = {name: name for name in get_args(Recompute)}
    return known[RECOMPUTE[index]]


def plans_of(run: Resolved) -> Plans:
    """A resolved run's plan, as one row."""
    plan, mesh = run.plan, run.plan.mesh
    numbers = {name: getattr(mesh, name) for name in ("pp", "dp", "cp", "tp", "ep", "replicas")} | {
        "sequence_parallel": plan.sequence_parallel,
        "context": CONTEXT.index(plan.context),
        "microbatch": plan.microbatch,
        "microbatches": plan.microbatches,
        "recompute": RECOMPUTE.index(plan.recompute),
        "schedule": SCHEDULES.index(plan.schedule),
        "chunks": plan.chunks,
        "microbatch_group": run.config.plan.microbatch_group or 0,
        "zero": plan.zero,
        "layers": run.shape.layers,
        "prefetch": plan.prefetch,
    }
    return Plans(**{name: np.array([float(number)]) for name, number in numbers.items()})


def run_config(plan: PlanConfig, problem: SearchProblem) -> RunConfig:
    """The run with another layout."""
    numerics = replace(problem.base.numerics, compute=problem.compute)
    return replace(problem.base, plan=plan, numerics=numerics)
