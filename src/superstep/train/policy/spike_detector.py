"""Spike detector: steps that a run rejects, and data that it skips.

    loss  ╷                        ·         mean + sigmas · standard deviation
          │ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
          │ . ' . · . ' · . . ' .            the window: the steps before
          └──────────────────────────────

Its inputs are equal on all ranks, so that every rank decides the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from superstep.plan.resolution.skip_and_rollback import batches_left_out
from superstep.plan.rollback import RollbackConfig
from superstep.train.policy.corruption_check import Corruption

LEAST_SPREAD = 1e-6
"""Smallest spread, relative to the mean: below it is rounding, where all steps are alike."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A rejected step.

    Attributes:
        step: its number.
        why: the rule that it broke, with the figures.
        corruption: of the state, if that is the reason.
    """

    step: int
    why: str
    loss: float
    grad_norm: float
    corruption: Corruption | None = None


class SpikeDetector:
    """The detector of one run.

    Args:
        rules: for rejected steps; None accepts all.
        skip: data to skip, as in ``train.skip``.
    """

    def __init__(self, rules: RollbackConfig | None, skip: Iterable[str]) -> None:
        self.rules = rules
        self._left_out = batches_left_out(skip)
        self.window_steps = rules.window_steps if rules else 0
        self._window: deque[tuple[int, float, float]] = deque(maxlen=self.window_steps)
        self._repeats = 0
        self._last_refused = 0

    def why_not(self, loss: float, grad_norm: float) -> str:
        """Why a step is rejected; empty if it is accepted."""
        if self.rules is None:
            return ""
        rules = (("loss", loss, self.rules.loss_sigmas, 1), ("gradient norm", grad_norm, self.rules.norm_sigmas, 2))
        for name, value, sigmas, place in rules:
            if not math.isfinite(value):
                return f"its {name} is {value}"
            if 2 * len(self._window) < self.rules.window_steps:
                continue
            before = [entry[place] for entry in self._window]
            mean = statistics.fmean(before)
            spread = max(statistics.stdev(before), LEAST_SPREAD * abs(mean))
            if value > mean + sigmas * spread:
                return (
                    f"its {name} of {value:.4g} is {(value - mean) / spread:.1f} standard deviations above the "
                    f"{mean:.4g} of the {len(before)} steps before; rollback allows {sigmas:g}"
                )
        return ""

    def took(self, step: int, loss: float, grad_norm: float) -> None:
        """Record an accepted step."""
        self._window.append((step, loss, grad_norm))

    def batches_left_out_after(self, step: int) -> int:
        """Number of batches to skip after a step."""
        return self._left_out.get(step, 0)

    def next_gap(self, step: int, last: int) -> int:
        """The next step after which data is skipped, at most ``last``."""
        return min([last, *(each for each in self._left_out if each > step)])

    def is_hopeless(self, refused: SkippedStep) -> bool:
        """Count a rollback; whether there were too many."""
        assert self.rules is not None
        self._count(refused.step)
        return self._repeats > self.rules.repeats

    def _count(self, refused: int) -> None:
        is_further = refused > self._last_refused + self.window_steps
        self._repeats = 1 if is_further else self._repeats + 1
        self._last_refused = max(self._last_refused, refused)

    def forget_after(self, step: int) -> None:
        """Drop records after a step."""
        while self._window and self._window[-1][0] > step:
            self._window.pop()

    def go_back(self, step: int, refused: SkippedStep) -> str:
        """Drop records after a step; returns the data to skip from there on, in the format of ``train.skip``."""
        assert self.rules is not None
        self.forget_after(step)
        if not self.rules.skip_batches:
            return ""
        # If the run goes back further, the steps up to the aim are repeated unchanged; if less far, batches before that
        # state are not skipped any more.
        aim = refused.step - 1 - self.rules.back_steps
        after = max(step, aim)
        batches = self.rules.skip_batches - (after - aim)
        self._leave_out(after, batches)
        return f"{after}:{batches}"

    def _leave_out(self, after: int, batches: int) -> None:
        self._left_out[after] = self._left_out.get(after, 0) + batches

    def recall(self, lines: Iterable[Mapping[str, Any]], step: int) -> None:
        """Restore from the run's ``metrics.jsonl``, up to ``step``."""
        for line in (line for line in lines if line.get("step", 0) <= step):
            match line["event"]:
                case "step" if line["loss"] is not None and line["grad_norm"] is not None:
                    self.took(line["step"], line["loss"], line["grad_norm"])
                case "rolled_back":
                    self._count(line["refused"])
                    for after, batches in batches_left_out([line["skip"]] if line["skip"] else []).items():
                        self._leave_out(after, batches)
