"""Goodput: the share of time that advances a run, when chips fail and state is saved.

ETTR, the effective training time ratio (Kokolis 2024, "Revisiting Reliability in Large-Scale Machine Learning Research
Clusters"): seconds of steps that stand, over all seconds from the first start on.

    failures        every chip alike, independent: one of n fails every 1 / (n · rate)
      soft          a process dies and its host's memory stays: back to the newest snapshot
      hard          the host is gone, and its memory: back to the newest checkpoint
    a failure       is noticed, the ranks start again, and what came after the state is done again, half an interval
    a snapshot      stalls for what the step does not hide; a checkpoint is written from one, beside training

    lost share      stall / T1 + stall / T2 + soft rate · (noticed + started + T1 / 2)
                    + hard rate · (noticed + started + read + flush + T2 / 2)

Its minimum: T = sqrt(2 · stall / rate) (Young 1974), with a correction for stalls that are not short compared with the
time between failures (Daly 2006, eq. 37). ``simulate`` draws failures and checks both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MEMORY_SHARE = 0.22
"""The share of failures that keep a host's memory: 78% of Llama 3's 419 unexpected interruptions were attributed to
hardware (Dubey 2024, 3.3.4).
"""

NOTICED_S = 3.0
"""Until a lost rank is noticed."""

STARTED_S = 60.0
"""From then until ranks compute again: processes, groups, compilation. An assumption; measure your own."""

SPARED = 1e-3
"""The largest share of time for hard failures before checkpoints come more often than the disk needs anyway."""

DISK_BYTES_PER_S = 2e9
"""One host's rate to the checkpoints' storage, unless measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """The failures of a run.

    Attributes:
        mtbf_s: seconds between failures of any of its chips.
        memory_share: of failures that keep the hosts' memory.
        noticed_s, started_s: for each failure.
        read_s: of a checkpoint, after a hard failure.
    """

    mtbf_s: float
    memory_share: float = MEMORY_SHARE
    noticed_s: float = NOTICED_S
    started_s: float = STARTED_S
    read_s: float = 0.0

    @property
    def soft_s(self) -> float:
        """Seconds between failures that keep memory."""
        return self.mtbf_s / self.memory_share if self.memory_share else math.inf

    @property
    def hard_s(self) -> float:
        """Seconds between failures that lose memory."""
        return self.mtbf_s / (1 - self.memory_share) if self.memory_share < 1 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How state is saved.

    Attributes:
        snapshot_s: training between two snapshots; infinite without.
        snapshot_stall_s: of one snapshot.
        save_s: training between two checkpoints.
        save_stall_s: of one checkpoint; 0 where it is written from a snapshot.
        flush_s: from the state of a checkpoint to its end on disk.
    """

    snapshot_s: float = math.inf
    snapshot_stall_s: float = 0.0
    save_s: float
    save_stall_s: float = 0.0
    flush_s: float = 0.0


def mtbf_s(chips: int, failures_per_hour: float) -> float:
    """Seconds between failures of any of ``chips`` chips."""
    return 3600 / (chips * failures_per_hour)


def young(stall_s: float, between_s: float) -> float:
    """The best interval for short stalls (Young 1974)."""
    return math.sqrt(2 * stall_s * between_s)


def daly(stall_s: float, between_s: float) -> float:
    """The best interval for any stalls (Daly 2006, eq. 37)."""
    if math.isinf(between_s):
        return math.inf
    ratio = stall_s / (2 * between_s)
    if ratio >= 1:
        return between_s
    return young(stall_s, between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def ettr(hazard: Hazard, saving: Saving) -> float:
    """The share of the time in steps that count."""
    stalls = saving.snapshot_stall_s / saving.snapshot_s + saving.save_stall_s / saving.save_s
    again = hazard.noticed_s + hazard.started_s
    hard = again + hazard.read_s + saving.flush_s + saving.save_s / 2
    soft = hard if math.isinf(saving.snapshot_s) else again + saving.snapshot_s / 2
    lost = soft / hazard.soft_s + hard / hazard.hard_s
    return max(0.0, 1 - lost) / (1 + stalls)


def recommend(hazard: Hazard, *, step_s: float, copy_s: float, flush_s: float) -> Saving:
    """Intervals for a run with snapshots, in whole steps.

    Args:
        copy_s: of a snapshot; what is longer than a step stalls the next.
        flush_s: of a checkpoint, beside training.
    """
    stall_s = max(copy_s - step_s, 0.0)
    # The disk works at most half of the time, and no more often than it is worth.
    save_s = max(2 * flush_s, min(2 * SPARED * hazard.hard_s, daly(flush_s, hazard.hard_s)))
    return Saving(
        snapshot_s=_steps(min(daly(stall_s, hazard.soft_s), save_s), step_s) * step_s,
        snapshot_stall_s=stall_s,
        save_s=_steps(save_s, step_s) * step_s,
        flush_s=flush_s,
    )


def without_snapshots(hazard: Hazard, *, step_s: float, flush_s: float) -> Saving:
    """The interval for a run that waits for its checkpoints, in whole steps."""
    return Saving(save_s=_steps(daly(flush_s, hazard.mtbf_s), step_s) * step_s, save_stall_s=flush_s)


def _steps(seconds: float, step_s: float) -> int:
    return max(1, round(seconds / step_s))


def unhurt(*, elapsed_s: float, steps_s: float, validations_s: float, saves_s: float) -> float:
    """``ettr`` of a run without failures, at the start of its steps.

    Args:
        elapsed_s: until then.
        steps_s, validations_s, saves_s: of all to come; saving beside training takes 0.
    """
    return steps_s / (elapsed_s + steps_s + validations_s + saves_s)


def simulate(hazard: Hazard, saving: Saving, *, failures: int, seed: int) -> float:
    """``ettr`` of a run with random failures: a history, with failures during recovery too."""
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(hazard.mtbf_s, failures)
    is_soft = draw.random(failures) < hazard.memory_share
    per_second = 1 + saving.snapshot_stall_s / saving.snapshot_s + saving.save_stall_s / saving.save_s
    wall = reached = on_disk = to_wait = 0.0
    for gap, leaves_memory in zip(gaps, is_soft, strict=True):
        wall += gap
        made = max(gap - to_wait, 0.0) / per_second
        now = reached + made
        # What came back is the newest state that was whole, and no later one has been since.
        on_disk = max(on_disk, math.floor((now - saving.flush_s) / saving.save_s) * saving.save_s)
        has_snapshot = leaves_memory and not math.isinf(saving.snapshot_s)
        reached = math.floor(now / saving.snapshot_s) * saving.snapshot_s if has_snapshot else on_disk
        to_wait = hazard.noticed_s + hazard.started_s + (0.0 if has_snapshot else hazard.read_s)
    return reached / wall
