"""RollbackConfig: which steps a run goes back from, and how far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackConfig:
    """Rollback after a step whose loss or gradient norm is not a number, or far above those before it: the step is not
    taken, and the run goes back. The table turns it on, even if empty; without it a loss that is not a number ends the
    run.
    """

    loss_sigmas: float = 6.0
    """The most standard deviations of a loss above the mean of earlier steps (6 in OLMo-core's `SkipStepOptimizer`)."""
    norm_sigmas: float = 6.0
    """The same for the gradient norm before clipping."""
    window_steps: int = 128
    """Steps in the mean (128 there); with fewer than half of them, only a value that is not a number counts."""
    back_steps: int = 100
    """How far before the step data is left out, and the oldest state to go back to (about 100 in PaLM, Chowdhery 2022,
    5.1); 0 continues from the state that the step began with.
    """
    skip_batches: int = 200
    """Batches left out from there (200 to 500 in PaLM); 0 trains on the same data again, as after a hardware fault."""
    repeats: int = 3
    """How often a run may go back without getting `window_steps` steps beyond the last time; then it ends."""
