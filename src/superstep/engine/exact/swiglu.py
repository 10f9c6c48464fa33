"""The gate of a feed-forward, element by element: bits do not depend on an element's place in the tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superstep.kernels import swiglu


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
