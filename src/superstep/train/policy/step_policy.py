"""Checks of a step before its update: loss and norm, the state at rest, the gradient of other ranks.

judge_of(step) ──► the engine runs the program ──► judge(loss, norm): why the update is rejected, or ""
                                                     └─► explain: which ranks were wrong, where that is why
"""

from __future__ import annotations

from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine, Judge, StepResult
from superstep.errors import Fault
from superstep.numerics.objective import Objective
from superstep.plan.resolution.resolve import Resolved
from superstep.train.policy.corruption_check import Integrity
from superstep.train.policy.gradient_recheck import DIFFERS, GradientRecheck, RowsOf
from superstep.train.policy.spike_detector import SkippedStep, SpikeDetector


class StepPolicy:
    """The policy of one rank; all ranks decide the same.

    Args:
        run: the resolved run.
        engine: computes.
        peers: the ranks.

    Attributes:
        spikes: rejected steps and skipped data.
        integrity: checks of the state's bits.
    """

    def __init__(self, run: Resolved, engine: Engine, peers: RankPeers) -> None:
        state = run.config.state
        self.spikes = SpikeDetector(run.config.rollback, run.config.train.skip)
        self.integrity = Integrity(state.fingerprint_every, engine, peers)
        self._recheck = GradientRecheck(state.recompute_every, run.plan, engine, self.integrity)
        self._rank = peers.rank
        self._has_judge = (
            self.spikes.rules is not None or (state.fingerprint_every or state.recompute_every) is not None
        )

    def judge_of(
        self, step: int, *, is_saved: bool, loss: float | None, rows_of: RowsOf | None, objective: Objective | None
    ) -> Judge | None:
        """The check before the update of a step; None without one. Every rank calls this together.

        Args:
            step: its number.
            is_saved: whether a checkpoint follows it.
            loss: replaces the engine's; None uses the engine's.
            rows_of: the rows of each data-parallel place; None disables the recheck of the gradient.
            objective: of the step.
        """
        self.integrity.watch(is_due=self.integrity.is_due(step, is_saved=is_saved))
        if not self._has_judge:
            return None
        expected: str | None = None
        if rows_of is not None and self._recheck.is_due(step):
            expected = self._recheck.gradient(rows_of, objective, shift=1)

        def judge(computed: float, norm: float) -> str:
            why = self.integrity.at_rest(step - 1) or self.spikes.why_not(computed if loss is None else loss, norm)
            if not why and expected is not None and self.integrity.gradient() != expected:
                return DIFFERS
            return why

        return judge

    def explain(self, result: StepResult, step: int, rows_of: RowsOf | None, objective: Objective | None) -> None:
        """Find the wrong ranks if a gradient differed from other ranks'. Every rank calls this together.

        Raises:
            Fault: the step was rejected, and there are no rules for a rollback: a sum has left its exact range.
        """
        if result.refused == DIFFERS:
            assert rows_of is not None
            self.integrity.note_recomputed(self._recheck.blame(rows_of, objective, step))
        if result.refused and self.spikes.rules is None and not self.integrity.has_detected:
            raise Fault(result.refused, rank=self._rank, step=step)

    def make_skipped(self, result: StepResult, step: int) -> SkippedStep:
        """The record of a rejected step."""
        return SkippedStep(step, result.refused, result.loss, result.grad_norm, self.integrity.take())
