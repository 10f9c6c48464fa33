"""The rotary embedding by given tables: reference, and kernel for a CPU.

B  sequences    N  heads
S  positions    H  width of one head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superstep.kernels import cpu_library


def reference(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + H/2) of a head rotated by its token's angle (Su 2021).

    Args:
        cos: [S, 1, H] or [B, S, 1, H], each pair's twice.
        sin: likewise, the first half negative.
    """
    return x_BSNH * cos + x_BSNH.roll(x_BSNH.shape[-1] // 2, -1) * sin


def takes(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        cpu_library.takes(x_BSNH, cos, sin)
        and x_BSNH.shape[-1] % (2 * cpu_library.LANES) == 0
        and x_BSNH.dim() == 4
        and x_BSNH.stride(-1) == 1
        and (cos.dim() == 3 or cos.shape[0] in (1, x_BSNH.shape[0]))
    )


def turn(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``reference`` by the kernel. Tables have no gradient."""
    out: Tensor = _turn(x_BSNH, cos, sin, 1.0)
    return out


@torch.library.custom_op("superstep::turn", mutates_args=())
def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """The pairs rotated by the angles, or by their negatives."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out: Tensor = _empty_turn(x, cos, sin, sign)
    tables = cos.shape[0] if cos.dim() == 4 else 1
    strides = x.stride()[:-1]
    cpu_library.run("turn", x.dtype == torch.bfloat16, x, *strides, cos, sin, tables, out, *x.shape, sign)
    return out


@_turn.register_fake
def _empty_turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    _, cos, sin, ctx.sign = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
    dx: Tensor = _turn(grad, *ctx.saved_tensors, -ctx.sign)
    return dx, None, None, None


_turn.register_autograd(_backward, setup_context=_keep)
