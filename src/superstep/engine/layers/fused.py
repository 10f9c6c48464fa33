"""Fused layers of fast mode: kernels for norms, the rotary embedding and gates.

The modules' code is not changed; their forwards are replaced, as everywhere in ``engine``. Unsupported sizes, such as a
head of 24 numbers, use the module's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from superstep.comm.device import Device
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.kernels import cpu_library, norm, rope, swiglu, triton_loader
from superstep.model.decoder import Attention
from superstep.model.feedforward import FeedForward
from superstep.model.mixture.experts import Experts
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.plan.resolution.resolve import Resolved

LayerKernels = Literal["torch", "c++", "triton"]
"""Implementation of the loss, norms, gates and the rotary embedding."""

LANGUAGES = {"c++": "C++", "triton": "Triton"}

Takes = Callable[..., bool]
"""Whether a kernel supports some tensors."""


def wants_kernels(run: Resolved, device: Device) -> bool:
    """Whether a run uses ``superstep.kernels``, if available; on a GPU only by name. None of them reads fp16."""
    wanted = ("auto", "triton") if device.kind == "cpu" else ("triton",)
    numerics = run.config.numerics
    return run.plan.grain is None and numerics.compute != "fp16" and numerics.kernels in wanted


def layer_kernels(run: Resolved, device: Device) -> LayerKernels:
    """The implementation of the loss, norms, gates and the rotary embedding."""
    if not wants_kernels(run, device):
        return "torch"
    if device.kind == "cpu":
        return "c++" if cpu_library.is_compiled() else "torch"
    return "torch" if triton_loader.missing(device.torch) else "triton"


def list_fused_layers(kernels: LayerKernels) -> tuple[Implementation, ...]:
    """Norms, gates and the rotary embedding of attention."""
    match kernels:
        case "torch":
            return ()
        case "c++":
            return _rows(LANGUAGES[kernels], _norm, gate=(swiglu.swiglu, _takes_gate), turn=(rope.turn, rope.takes))
        case "triton":  # imported here: a CPU needs no Triton
            by_norm, by_gate, by_rope = map(triton_loader.module, ("norm", "swiglu", "rope"))

            def norm_by_triton(layer: RMSNorm, own: Forward) -> Forward:
                return lambda x: by_norm.rms_norm(x, layer.weight, layer.eps)

            return _rows(
                LANGUAGES[kernels], norm_by_triton, gate=(by_gate.swiglu, _always), turn=(by_rope.rope, _always)
            )


def _rows(
    language: str,
    norm_by: Callable[[RMSNorm, Forward], Forward],
    *,
    gate: tuple[Callable[..., Tensor], Takes],
    turn: tuple[Callable[..., Tensor], Takes],
) -> tuple[Implementation, ...]:
    def row(what: str, kinds: tuple[type, ...], build: Callable[[Any, Forward], Forward]) -> Implementation:
        return Implementation(
            f"{what} in {language}",
            "numerics.kernels",
            lambda path, layer: type(layer) in kinds and _is_plain(layer),
            lambda path, layer, inner: build(layer, inner),
        )

    def make_turned(layer: Attention, inner: Forward) -> Forward:
        layer.rope = FusedRotary(layer.rope, *turn)  # type: ignore[assignment]
        return inner

    return (
        row("norm", (RMSNorm,), norm_by),
        row("gate", (FeedForward, Experts), lambda layer, inner: make_gated(layer, *gate)),
        row("rotary embedding", (Attention,), make_turned),
    )


def _is_plain(layer: Any) -> bool:  # noqa: ANN401
    """Whether kernels have the layer: no norm with an offset, no gate but silu, attention with a rotary embedding."""
    if isinstance(layer, RMSNorm):
        return layer.offset == 0.0
    if isinstance(layer, Attention):
        return layer.position_bias is None
    return has_silu(layer) if isinstance(layer, FeedForward) else True


def has_silu(layer: nn.Module) -> bool:
    """Whether a layer is a feed-forward, or experts, with SiLU in its gate."""
    return isinstance(layer, FeedForward | Experts) and isinstance(layer.act_fn, nn.SiLU)


def _always(*tensors: Tensor) -> bool:
    return True


def _takes_gate(gate: Tensor, up: Tensor) -> bool:
    return swiglu.takes(gate, up) and cpu_library.is_compiled()


@dataclass(frozen=True, slots=True)
class FusedRotary:
    """The rotary embedding by a kernel where it supports the heads, from the model's own tables."""

    rope: Rope
    turn: Callable[..., Tensor]
    takes: Takes

    def __call__(self, x_BSNH: Tensor, positions: Tensor | None = None) -> Tensor:
        """As ``Rope``."""
        cos, sin = self.rope.tables_of(x_BSNH, positions)
        return self.turn(x_BSNH, cos, sin) if self.takes(x_BSNH, cos, sin) else self.rope(x_BSNH, positions)


def _norm(layer: RMSNorm, own: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        return norm.rms_norm(x, layer.weight, layer.eps) if norm.takes(x, layer.weight) else own(x)

    return forward


def make_gated(
    layer: FeedForward | Experts, gate_by: Callable[[Tensor, Tensor], Tensor], takes: Takes = _takes_gate
) -> Forward:
    """The layer's forward with ``gate_by(gate, up)`` for silu(gate) · up, where the kernel ``takes`` them."""

    def forward(x: Tensor, *rows: Tensor | None) -> Tensor:
        """Experts also pass the number of rows of each."""
        gate, up = layer.gate_proj(x, *rows), layer.up_proj(x, *rows)
        inner = gate_by(gate, up) if takes(gate, up) else layer.act_fn(gate) * up
        out: Tensor = layer.down_proj(inner, *rows)
        return out

    return forward
