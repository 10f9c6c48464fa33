"""Layers whose weight gradients go straight into the gradient buffer.

Autograd would make a new tensor for a weight's gradient and then add it to the buffer: one more pass over memory as
large as the weight for every microbatch, and for an embedding a whole table that is nearly all zeros. These do the
sum in the product, or in the rows that were looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, into: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.into = into
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        if rows.dtype == ctx.into.dtype:
            ctx.into.addmm_(rows.t(), x.flatten(0, -2))
        else:
            ctx.into.add_(rows.t() @ x.flatten(0, -2))
        return (rows @ weight).view_as(x), None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, into: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens)
        ctx.into = into
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        rows = grad.flatten(0, -2).to(ctx.into.dtype)
        # index_put sorts on a GPU, so that its sum has one order; index_add would use atomics there.
        if rows.is_cuda:
            ctx.into.index_put_((tokens.flatten(),), rows, accumulate=True)
        else:
            ctx.into.index_add_(0, tokens.flatten(), rows)
        return None, None, None


def accumulate_after(module: nn.Module) -> None:
    """For a module whose own code makes the gradients: take each as it comes and add it to the buffer.

    Left to itself, autograd would first turn a bf16 gradient into an fp32 one, and then add that.
    """
    for param in module.parameters():
        if param.dtype != torch.float32 and param.grad is not None:
            param.register_post_accumulate_grad_hook(_adds_to(param.grad))
            param.grad = None
            param.grad_dtype = param.dtype


def _adds_to(into: Tensor) -> Callable[[Tensor], None]:
    def add(param: Tensor) -> None:
        assert param.grad is not None
        into.add_(param.grad)
        param.grad = None

    return add


def accumulate_straight(module: nn.Module) -> None:
    """Change the forward of the module's linears and embeddings so. Their weights' ``.grad`` must be there."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            _replace(layer, _linear(layer))
        elif isinstance(layer, nn.Embedding) and layer.padding_idx is None and layer.max_norm is None:
            _replace(layer, _embedding(layer))


def _replace(layer: nn.Module, forward: Any) -> None:  # noqa: ANN401
    layer.forward = forward


def _linear(layer: nn.Linear) -> Any:  # noqa: ANN401
    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, layer.weight, layer.bias)
        out: Tensor = _Linear.apply(x, layer.weight, layer.weight.grad)  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias

    return forward


def _embedding(layer: nn.Embedding) -> Any:  # noqa: ANN401
    def forward(tokens: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.embedding(tokens, layer.weight)
        # Tokens carry no gradient, so the graph hangs on the weight; its own gradient is left as it is.
        out: Tensor = _Embedding.apply(tokens, layer.weight, layer.weight.grad)  # type: ignore[no-untyped-call]
        return out

    return forward
