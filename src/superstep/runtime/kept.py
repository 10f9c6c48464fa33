"""Which of what kernels may keep a run's do: the memory that is foreseen is that of what computes."""

from __future__ import annotations

from dataclasses import replace

from superstep.kernels.attention import LANES
from superstep.plan.kept import Kept
from superstep.plan.resolve import Resolved
from superstep.runtime.attention import is_compiled
from superstep.runtime.device import Device
from superstep.runtime.fused import is_fused


def with_kept(run: Resolved, device: Device) -> Resolved:
    """The run, knowing what its kernels keep on a device."""
    if run.decoder is None:
        return run
    takes_heads = run.decoder.head_dim % LANES == 0
    kept = Kept(silu=not is_fused(run, device), window_blocks=not (takes_heads and is_compiled(run, device)))
    return replace(run, kept=kept)
