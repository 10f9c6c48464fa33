"""AdamW over a flat shard in one pass: clipping, both moments, decay, the update, and the copy that computes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 1024
"""Of a program."""


@triton.jit
def _update(
    param, grad, first, second, copy, count, scale, beta1, beta2, rest1, rest2, eps, shrink, step_size, second_scale,
    COPY: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_there = at < count
    g = tl.load(grad + at, mask=is_there, other=0.0).to(tl.float32) * scale
    m = tl.load(first + at, mask=is_there, other=0.0)
    v = tl.load(second + at, mask=is_there, other=0.0)
    p = tl.load(param + at, mask=is_there, other=0.0)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p = p * shrink - step_size * m / (tl.sqrt(v) * second_scale + eps)
    tl.store(first + at, m, mask=is_there)
    tl.store(second + at, v, mask=is_there)
    tl.store(param + at, p, mask=is_there)
    if COPY:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=is_there)


def update(
    param: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    scale: float = 1.0,
    copy: Tensor | None = None,
) -> None:
    """Adam with decoupled weight decay (Loshchilov 2019, algorithm 2), in place. All tensors are flat.

    Args:
        param: fp32, as are the moments.
        grad: of any dtype; it is left as it is.
        moments: of first and second order.
        step: updates with this one.
        scale: multiplies the gradient: what clipping leaves of it.
        copy: gets the new parameters, rounded to its dtype.
    """
    (beta1, beta2), count = betas, param.numel()
    _update[triton.cdiv(count, NUMBERS),](
        *(param, grad, *moments, param if copy is None else copy, count, scale, beta1, beta2, 1.0 - beta1, 1.0 - beta2),
        *(eps, 1.0 - lr * decay, lr / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5),
        COPY=copy is not None,
        NUMBERS=NUMBERS,
    )
