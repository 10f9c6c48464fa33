"""Which of what kernels may keep a run's do: the memory that is foreseen is that of what computes."""

from __future__ import annotations

from dataclasses import replace

from superstep.kernels import fused
from superstep.kernels.attention import LANES, missing
from superstep.plan.kept import Kept
from superstep.plan.resolve import Resolved
from superstep.runtime.attention import is_compiled as attends
from superstep.runtime.device import Device
from superstep.runtime.fused import is_fused


def with_kept(run: Resolved, device: Device) -> Resolved:
    """The run, knowing what its kernels keep on a device."""
    if run.decoder is None:
        return run
    takes_heads = run.decoder.head_dim % LANES == 0
    has_kernels = device.kind == "cpu" and fused.compiled().library is not None
    if run.plan.grain is not None:
        by_blocks = device.kind == "cpu" and takes_heads and not missing(device.torch)
        sums = has_kernels and run.decoder.width % LANES == 0
        kept = Kept(silu=not has_kernels, exact_scores=not by_blocks, exact_products=not sums)
    else:
        kept = Kept(silu=not is_fused(run, device), window_blocks=not (takes_heads and attends(run, device)))
    return replace(run, kept=kept)
