"""RMSNorm of rows: reference, and kernel for a CPU.

R  rows    D  width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superstep.kernels import cpu_library


def reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dim (Zhang 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D


def takes(x: Tensor, weight_D: Tensor) -> bool:
    return cpu_library.takes(x, weight_D) and x.shape[-1] == weight_D.numel() and x.shape[-1] % cpu_library.LANES == 0


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``reference`` by the kernel: fp32 inside, rounded once. The weight's gradient is fp32."""
    out: Tensor = rms_norm_operator(x, weight_D, eps)[0]
    return out


def backward_on_grid(
    grad: Tensor, x: Tensor, weight_D: Tensor, r: Tensor, *, into_D: Tensor | None, scale: float, limit: float
) -> tuple[Tensor, bool]:
    """The gradient of ``x``. The weight's is added to ``into_D``, int64, with each row's share first put on a grid
    (``numerics.fixed_point``); returns whether each was a number below the limit in size.

    Args:
        grad: the gradient of the result, of the shape and dtype of ``x``.
        r: 1 / rms of each row, fp32.
        into_D: None for a frozen weight.
        scale, limit: powers of two.
    """
    grad, x, wrong = grad.contiguous(), x.contiguous(), torch.zeros(1, dtype=torch.int64)
    dx, rows, width = torch.empty_like(x), r.numel(), x.shape[-1]
    cpu_library.run(
        *("norm_backward_on_grid", x.dtype == torch.bfloat16, grad, x, weight_D.contiguous(), r.contiguous(), dx),
        *(into_D, rows, width, float(scale), float(limit), wrong),
    )
    return dx, not wrong.item()


@torch.library.custom_op("superstep::rms_norm", mutates_args=())
def rms_norm_operator(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and 1 / rms of each row."""
    x = x.contiguous()
    out, r_R = _empty_norm(x, weight, eps)
    cpu_library.run("norm", x.dtype == torch.bfloat16, x, weight.contiguous(), out, r_R, r_R.numel(), x.shape[-1], eps)
    return out, r_R


@torch.library.custom_op("superstep::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, is_trained: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, the latter empty for a frozen weight."""
    grad, x = grad.contiguous(), x.contiguous()
    dx, dweight = _empty_norm_backward(grad, x, weight, r, is_trained)
    into = dweight if is_trained else None
    rows, width = r.numel(), x.shape[-1]
    if rows == 0:
        return dx, dweight.zero_()
    cpu_library.run("norm_backward", x.dtype == torch.bfloat16, grad, x, weight.contiguous(), r, dx, into, rows, width)
    return dx, dweight


@rms_norm_operator.register_fake
def _empty_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(x.shape[:-1], dtype=torch.float32)


@_rms_norm_backward.register_fake
def _empty_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, is_trained: bool) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, weight.new_empty(weight.numel() if is_trained else 0, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None]:  # noqa: ANN401
    is_trained = ctx.needs_input_grad[1]
    dx, dweight = _rms_norm_backward(grad, *ctx.saved_tensors, is_trained)
    return dx, dweight if is_trained else None, None


rms_norm_operator.register_autograd(_backward, setup_context=_keep)
