"""Failures of a plan: how often they come on its cluster, and how often its state should be saved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from superstep.cost.program.memory.snapshot_memory import SLOTS, snapshot_bytes
from superstep.plan.narrow import count_saved_bytes
from superstep.plan.optimizers import state_bytes
from superstep.planner.goodput import (
    DISK_BYTES_PER_S,
    Hazard,
    Saving,
    ettr,
    mtbf_s,
    recommend,
    without_snapshots,
)
from superstep.planner.simulate_best import SimulatedPlan

CHIPS_PER_HOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """A plan under failures.

    Attributes:
        hazard: how often they come, and their cost.
        copy_s, flush_s: of a rank's snapshot, and of a checkpoint.
        state_bytes: of the checkpoint.
        kept: intervals with snapshots.
        plain: without, where training waits for each checkpoint.
    """

    hazard: Hazard
    step_s: float
    copy_s: float
    flush_s: float
    state_bytes: float
    kept: Saving
    plain: Saving

    @property
    def ettr(self) -> float:
        """With snapshots."""
        return ettr(self.hazard, self.kept)

    @property
    def plain_ettr(self) -> float:
        """Without."""
        return ettr(self.hazard, self.plain)

    def steps(self, seconds: float) -> int:
        """An interval in steps."""
        return round(seconds / self.step_s)


def survival(plan: SimulatedPlan, failures_per_hour: float | None) -> FailureCost | None:
    """A plan under failures; None where the chip's failures are unknown. ``failures_per_hour``: of one chip with its
    share of the host; None takes the catalogue's.
    """
    cluster = plan.priced.side.problem.cluster
    rate = failures_per_hour if failures_per_hour is not None else cluster.chip.failures_per_hour
    if rate is None:
        return None
    state = replace(plan.run.config.state, snapshot_every=1)
    copied = snapshot_bytes(replace(plan.run, config=replace(plan.run.config, state=state))) / SLOTS
    written_bytes = float(state_bytes(plan.run.config.train.optimizer) * plan.run.outline.numel)
    written_bytes -= count_saved_bytes(plan.run.config, plan.run.outline)
    hosts = math.ceil(cluster.chips / min(CHIPS_PER_HOST, cluster.domain))
    written = hosts * (cluster.disk_write_bytes_per_s or DISK_BYTES_PER_S)
    read = hosts * (cluster.disk_read_bytes_per_s or DISK_BYTES_PER_S)
    hazard = Hazard(mtbf_s=mtbf_s(cluster.chips, rate), read_s=written_bytes / read)
    copy_s, flush_s = copied / cluster.chip.host_bytes_per_s, written_bytes / written
    return FailureCost(
        hazard=hazard,
        step_s=plan.step_s,
        copy_s=copy_s,
        flush_s=flush_s,
        state_bytes=written_bytes,
        kept=recommend(hazard, step_s=plan.step_s, copy_s=copy_s, flush_s=flush_s),
        plain=without_snapshots(hazard, step_s=plan.step_s, flush_s=flush_s),
    )
