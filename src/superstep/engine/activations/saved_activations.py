"""Activations that kernels keep: the memory forecast must match the kernels in use."""

from __future__ import annotations

from dataclasses import replace

from superstep.comm.device import Device, gpus
from superstep.cost.program.memory.gpu_kept import expands_keys
from superstep.engine.attention.choose_attention import is_compiled
from superstep.engine.layers.fused import layer_kernels
from superstep.kernels import cpu_library, exact_attention
from superstep.kernels.attention import LANES
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.saved_activations import SavedActivations


def with_kept_here(run: Resolved) -> Resolved:
    """The run with the kept activations of its kernels on this host."""
    return with_kept(run, Device("cuda" if gpus() and run.config.plan.device != "cpu" else "cpu"))


def with_kept(run: Resolved, device: Device) -> Resolved:
    """The run with the kept activations of its kernels on a device."""
    if run.decoder is None:
        return run
    width, head_dim = run.decoder.width, run.decoder.head_dim
    if run.plan.grain is not None:
        has_kernels = device.kind == "cpu" and cpu_library.is_compiled()
        kept = SavedActivations(
            silu=not has_kernels,
            exact_scores=run.decoder.has_blockwise_rule or not exact_attention.is_for(head_dim, device.torch),
            exact_products=not (has_kernels and width % LANES == 0),
        )
    else:
        is_fused = layer_kernels(run, device) != "torch"
        by_kernel = head_dim % LANES == 0 and is_compiled(run, device)
        kept = SavedActivations(
            silu=not is_fused,
            window_blocks=not by_kernel,
            expanded_keys=device.kind != "cpu" and not by_kernel and expands_keys(run),
            wide_logits=not is_fused,
            rounded_products=device.kind == "cpu",
        )
    return replace(run, kept=kept)
