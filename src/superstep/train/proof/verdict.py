"""The verdict on a layout: which values differ, the first of them, and likely causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superstep.model.unit import UnitSpec
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_step
from superstep.train.proof.compare import KINDS, Difference
from superstep.train.proof.likely_causes import hints
from superstep.train.proof.restart import (
    RestartResult,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofVerdict:
    """The verdict on a layout.

    Attributes:
        compared: number of compared values, over all steps and ranks.
        worst: the largest difference of each kind from each yardstick, relative to its tolerance.
        first: the first wrong value, in the order of ``KINDS`` within each step; None without one.
        hints: likely causes, such as a factor that all gradients share, or the instructions that computed the value.
        again: the result of a second run, and of one that was stopped and resumed.
        stream: a difference between stream and plain code, as text; None if not checked.
        validation: the loss on the held-out text, compared with the reference's; None if not checked.
        sampler: a difference between sampler and plain code, as text; None if not checked.
    """

    compared: int
    worst: tuple[Difference, ...]
    first: Difference | None
    hints: tuple[str, ...]
    again: RestartResult
    stream: str | None = None
    validation: Difference | None = None
    sampler: str | None = None

    @property
    def is_deterministic(self) -> bool | None:
        """Whether a second run gave the same bits; None if not checked."""
        return self.again.is_rerun_same

    @property
    def is_proven(self) -> bool:
        return self.first is None and self.again.is_same and not any(self.wrong_beside)

    @property
    def wrong_beside(self) -> tuple[str, ...]:
        """Faults outside the steps, as text."""
        is_off = self.validation is not None and self.validation.is_wrong
        validation = self.validation.describe() if self.validation is not None and is_off else ""
        return tuple(text for text in (self.stream, validation, self.sampler) if text)


def judge(
    differences: Sequence[Difference], again: RestartResult, run: Resolved, specs: Sequence[UnitSpec]
) -> ProofVerdict:
    """The verdict by the compared values of all ranks, and by a second run."""
    # Of the ranks that hold a piece of one tensor the worst counts.
    names = list(dict.fromkeys(d.against for d in differences))
    parts = [[d for d in differences if d.against == name and d.kind == kind] for name in names for kind in KINDS]
    worst = tuple(max(part, key=lambda d: d.badness) for part in parts if part)
    wrong = [d for d in differences if d.is_wrong]
    first = min(wrong, key=lambda d: (d.step, KINDS.index(d.kind), names.index(d.against), -d.badness), default=None)
    likely = () if first is None else tuple(hints(first, differences, compile_step(run.plan), specs))
    return ProofVerdict(compared=len(differences), worst=worst, first=first, hints=likely, again=again)
