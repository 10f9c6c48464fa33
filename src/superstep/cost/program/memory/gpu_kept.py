"""What torch's kernels on a GPU keep of a run, known without torch."""

from __future__ import annotations

from dataclasses import replace

from superstep.plan.resolution.resolve import Resolved
from superstep.plan.saved_activations import WIDEST_FLASH, SavedActivations


def with_gpu_kept(run: Resolved) -> Resolved:
    """The run with torch's GPU kernels, where it does not use ours."""
    return replace(run, kept=SavedActivations(expanded_keys=expands_keys(run)))


def expands_keys(run: Resolved) -> bool:
    """Whether torch's attention on a GPU copies a key head for each of its query heads, and keeps the copies."""
    is_ring = run.plan.mesh.cp > 1 and run.plan.context == "ring"
    is_by_operator = run.config.data.is_masked or is_ring  # these keep what they were given
    if run.decoder is None or run.plan.grain is not None or is_by_operator:
        return False
    is_windowed = any(rule.window_in(run.config.data.sequence_tokens) is not None for rule in run.decoder.rules)
    return is_windowed or run.config.numerics.compute == "fp32" or run.decoder.head_dim > WIDEST_FLASH
