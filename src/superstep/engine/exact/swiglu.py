"""The gate of a feed-forward, element by element: bits do not depend on an element's place in the tensor.

GELU is its approximation with tanh (Hendrycks 2016):

    gelu(x) = x / 2 · (1 + tanh u) = x · s,   u = sqrt(2 / π) · (x + 0.044715 · x³),   s = 1 / (1 + e^(-2u))
    gelu'(x) = s + x · s · (1 - s) · 2 · u'
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from superstep.kernels import swiglu

CUBE = 0.044715
ROOT = math.sqrt(2 / math.pi)


class _SiLU(torch.autograd.Function):
    """x · sigmoid(x) by exponential and division: torch's own differs between a vector and the remainder."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        return _silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        x: Tensor = ctx.saved_tensors[0]
        wide = x.float()
        gate = 1.0 / wide.neg().exp_().add_(1.0)
        slope = (1.0 - gate).mul_(wide).add_(1.0).mul_(gate)
        slope.mul_(grad)
        return slope.to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def exact_silu(x: Tensor) -> Tensor:
    """The gate of a SwiGLU."""
    out: Tensor = _SiLU.apply(x)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    """silu(gate) · up, with both gradients in one pass of the kernel."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(gate, up)
        return _silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        return swiglu.backward(grad, *ctx.saved_tensors)


def exact_gate_of(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _Gelu(torch.autograd.Function):
    """By exponential and division: torch's own differs between a vector and the remainder."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _share(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        x: Tensor = ctx.saved_tensors[0]
        wide = x.float()
        share = _share(wide)
        steepness = (wide * wide).mul_(3 * CUBE).add_(1.0).mul_(2 * ROOT)
        slope = (1.0 - share).mul_(share).mul_(wide).mul_(steepness).add_(share)
        return slope.mul_(grad).to(x.dtype)


def _share(wide: Tensor) -> Tensor:
    """s above: the share of x that stays."""
    u = (wide * wide).mul_(CUBE).add_(1.0).mul_(wide).mul_(-2 * ROOT)
    return 1.0 / u.exp_().add_(1.0)


def exact_gelu_tanh(x: Tensor) -> Tensor:
    """The activation of a gate."""
    out: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return out
