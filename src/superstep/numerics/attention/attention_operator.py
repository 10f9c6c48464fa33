"""Gradients and fake results of an attention operator, in one place for all that there are.

    forward     (q, k, v, starts, bias, sinks, *settings)                to  (out, lse)
    backward    (grad, q, k, v, out, lse, starts, bias, *settings)       to  (dq, dk, dv, dbias), or (dq, dkv, dbias)

Queries are [B, S, N, H], keys and values [B, T, K, H], the log-sum-exp (lse) of scores [B, N, S] in fp32. ``starts``,
``bias`` and ``sinks`` are tensors or None. A gradient of no bias is an empty tensor, as operators return no None. The
output and lse have the sinks in them, so that ``backward`` needs no more (``numerics.attention.attention_sinks``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from superstep.numerics.attention.attention_sinks import sinks_gradient

BIAS = 3
"""The place of the bias after grad, q, k and v: out, lse and starts come before it."""


def connect_gradients(forward: CustomOpDef, backward: CustomOpDef, *, is_stacked: bool = False) -> None:
    """Let autograd and fake tensors pass through ``forward``.

    Args:
        is_stacked: whether ``backward`` gives the gradients of keys and values as one tensor, [2, B, T, K, H].
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
        q, k, v, starts, bias, sinks, *ctx.settings = inputs
        ctx.save_for_backward(q, k, v, *output, starts, bias, sinks)
        ctx.mark_non_differentiable(output[1])

    def go_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        *saved, sinks = ctx.saved_tensors  # read once, as recomputation needs
        grad = grad.contiguous()
        dq, *dkv, dbias = backward(grad, *saved, *ctx.settings)
        dk, dv = dkv[0].unbind() if is_stacked else dkv
        _, _, _, out, lse, _, bias = saved
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return dq, dk, dv, None, None if bias is None else dbias, dsinks, *(None for _ in ctx.settings)

    def fake(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        return empty(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        bias = others[BIAS]
        dkv = (k.new_empty(2, *k.shape),) if is_stacked else (empty(k), empty(v))
        return empty(q), *dkv, no_gradient(q) if bias is None else empty(bias)

    forward.register_fake(fake)
    backward.register_fake(fake_backward)
    forward.register_autograd(go_back, setup_context=keep)


def empty(x: Tensor) -> Tensor:
    """Contiguous memory for a tensor of the same shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def no_gradient(x: Tensor) -> Tensor:
    """What an operator returns for the gradient of no bias."""
    return x.new_empty(0, dtype=torch.float32)
