"""Which of a module's own steps a kernel takes over: norms, the rotary embedding and gates of a CPU's fast mode.

The modules stay as they are written; as everywhere in ``engine``, it is their forward that is replaced. What a kernel
does not take, a head of 24 numbers say, goes the module's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from superstep.comm.device import Device
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.kernels import cpu_library, norm, rope, swiglu
from superstep.model.decoder import Attention
from superstep.model.experts import Experts
from superstep.model.feedforward import FeedForward
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.plan.resolve import Resolved


def wants_kernels(run: Resolved, device: Device) -> bool:
    """Whether a run is to compute with the kernels of ``superstep.kernels`` for CPUs, where they can be had."""
    return run.plan.grain is None and run.config.numerics.kernels != "torch" and device.kind == "cpu"


def wants_attention(run: Resolved, device: Device) -> bool:
    """Whether it is to attend with one of them, a GPU's with those that were asked for by name."""
    by_name = run.plan.grain is None and run.config.numerics.kernels == "triton"
    return by_name or wants_kernels(run, device)


def is_fused(run: Resolved, device: Device) -> bool:
    """Whether it does between products."""
    return wants_kernels(run, device) and cpu_library.is_compiled()


def fused_layers() -> tuple[Implementation, ...]:
    """Norms, gates and the rotary embedding of attention."""

    def row(kernel: str, kinds: tuple[type, ...], build: Callable[[Any, Forward], Forward]) -> Implementation:
        return Implementation(
            f"{kernel} by the kernel",
            "numerics.kernels",
            lambda path, layer: type(layer) in kinds,
            lambda path, layer, inner: build(layer, inner),
        )

    return (
        row("norm", (RMSNorm,), _norm),
        row("gate", (FeedForward, Experts), lambda layer, inner: gated(layer, swiglu.swiglu)),
        row("rotary embedding", (Attention,), _with_fused_rotary),
    )


def _with_fused_rotary(layer: Attention, inner: Forward) -> Forward:
    layer.rope = FusedRotary(layer.rope)  # type: ignore[assignment]
    return inner


@dataclass(frozen=True, slots=True)
class FusedRotary:
    """The rotary embedding by the kernel, from the tables of the model's own."""

    rope: Rope

    def __call__(self, x_BSNH: Tensor, positions: Tensor | None = None) -> Tensor:
        """As ``Rope``."""
        cos, sin = self.rope.tables_of(x_BSNH, positions)
        return rope.turn(x_BSNH, cos, sin) if rope.takes(x_BSNH, cos, sin) else self.rope(x_BSNH, positions)


def _norm(layer: RMSNorm, own: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        return norm.rms_norm(x, layer.weight, layer.eps) if norm.takes(x, layer.weight) else own(x)

    return forward


def gated(layer: FeedForward | Experts, gate_by: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    """The layer's forward with ``gate_by(gate, up)`` for silu(gate) · up, where the kernel's library takes them."""

    def forward(x: Tensor, *rows: Tensor | None) -> Tensor:
        """Of experts it is told as well which rows are whose."""
        gate, up = layer.gate_proj(x, *rows), layer.up_proj(x, *rows)
        is_taken = swiglu.takes(gate, up) and cpu_library.is_compiled()
        inner = gate_by(gate, up) if is_taken else layer.act_fn(gate) * up
        out: Tensor = layer.down_proj(inner, *rows)
        return out

    return forward
