"""Linear layers, embeddings and norms with results and gradients that have the same bits on every layout.

There are four kinds of sums. Over the inner dim of a product: in cells, as in ``numerics.invariant_matmul``, and across
tensor-parallel ranks as the upper levels of the same tree. Over tokens, in a weight's gradient: each chunk of the
sequence is one product, rounded to a fixed grid and added as an integer, so that chunks may lie on any context-parallel
or data-parallel rank. Computations on a single token need no sum over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.comm.collectives import stack_ranks
from superstep.comm.mesh import Group
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward
from superstep.kernels.packed.unpack import Weight, split_weight, take_matrix
from superstep.model.packed_linear import PackedLinear, weight_of
from superstep.numerics.invariant_matmul import product, tree_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCut:
    """The cut of a linear layer's sums on this rank.

    Attributes:
        cells_in: cells of the input dim held here.
        cells_out: cells of the output dim held here.
        is_cut_in: whether the input dim is cut over tp, so that other ranks hold further cells.
        is_cut_out: whether the output dim is.
        chunks: chunks of the sequence held here.
        group: the tp ranks; None where tp = 1.
        sections: rows held here of each part of the output dim that is cut on its own; () for one.
    """

    cells_in: int
    cells_out: int
    is_cut_in: bool
    is_cut_out: bool
    chunks: int
    group: Group | None
    sections: tuple[int, ...] = ()

    def find_input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        """grad · weight, summed over all ranks' outputs: [T, I], fp32."""
        if self.sections:  # a cell has its share of each section
            order = _interleave(self.sections, self.cells_out).to(grad_TO.device)
            grad_TO, weight_OI = grad_TO.index_select(1, order), weight_OI.index_select(0, order)
        return self.over_ranks(product(grad_TO, weight_OI, cells=self.cells_out), is_cut=self.is_cut_out)

    def over_ranks(self, partial: Tensor, *, is_cut: bool) -> Tensor:
        """The upper levels of the tree: the sum over tp ranks, whole on each of them."""
        if self.group is None or not is_cut:
            return partial
        return tree_sum(stack_ranks(partial, self.group).unbind())


def _interleave(sections: Sequence[int], cells: int) -> Tensor:
    parts = [part.view(cells, -1) for part in torch.arange(sum(sections)).split(list(sections))]
    return torch.cat(parts, 1).flatten()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSI: Tensor, weight: Weight, sink: GradientSink | None, cut: ReductionCut) -> Tensor:  # noqa: ANN401
        ctx.packed, own = split_weight(weight)
        ctx.save_for_backward(None if sink is None else x_BSI, own)
        ctx.sink, ctx.cut = sink, cut
        return forward_product(x_BSI, take_matrix(weight, x_BSI.dtype), cut)

    @staticmethod
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        x_BSI, own = ctx.saved_tensors
        weight_OI = take_matrix(ctx.packed or own, grad_BSO.dtype)
        cut: ReductionCut = ctx.cut
        dx = cut.find_input_gradient(grad_BSO.flatten(0, -2), weight_OI)
        if ctx.sink is not None:
            ctx.sink.sums.do(partial(add_weight_gradient, ctx.sink, grad_BSO, x_BSI.detach(), cut.chunks))
        return dx.to(grad_BSO.dtype).view(*grad_BSO.shape[:-1], -1), None, None, None


def forward_product(x_BSI: Tensor, weight_OI: Tensor, cut: ReductionCut) -> Tensor:
    """x · weightᵀ, rounded to the dtype of x."""
    y = product(x_BSI.flatten(0, -2), weight_OI.t(), cells=cut.cells_in)
    y = cut.over_ranks(y, is_cut=cut.is_cut_in)
    return y.to(x_BSI.dtype).view(*x_BSI.shape[:-1], -1)


def add_weight_gradient(sink: GradientSink, grad_BSO: Tensor, x_BSI: Tensor, chunks: int) -> None:
    """``into += gradᵀ · x``, a product for each chunk of the sequence; ``into: [O, I]`` is int64."""
    if sink.grid.add_products(sink.into, grad_BSO, x_BSI, chunks):
        return
    for grad, x in zip(grad_BSO.chunk(chunks, dim=1), x_BSI.chunk(chunks, dim=1), strict=True):
        sink.grid.add(sink.into, product(grad.flatten(0, -2).t(), x.flatten(0, -2)))


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer is a linear in blocks of few bits, without an adapter."""
    return isinstance(layer, PackedLinear)


def exact_linear(
    layer: nn.Linear, sink: GradientSink | None, cut: ReductionCut, bias_sink: GradientSink | None
) -> Forward:
    """The layer's new forward; the gradients of its weight and bias go to the sinks. Frozen parameters have none."""
    bias = layer.bias

    def forward(x_BSI: Tensor) -> Tensor:
        y_BSO = linear(x_BSI, weight_of(layer), sink, cut)
        if bias_sink is None:
            return y_BSO if bias is None else y_BSO + bias
        return add_bias(y_BSO, bias, bias_sink)

    return forward


def add_bias(y: Tensor, bias: Tensor, sink: GradientSink) -> Tensor:
    """y + bias; the bias's gradient goes to ``sink``."""
    out: Tensor = _Bias.apply(y, bias, sink)  # type: ignore[no-untyped-call]
    return out


class _Bias(torch.autograd.Function):
    """A bias of outputs on this rank alone; its gradient is summed over tokens on a fixed grid."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, sink: GradientSink) -> Tensor:  # noqa: ANN401
        ctx.sink = sink
        return y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        ctx.sink.sums.do(partial(add_tokens, ctx.sink, grad.to(torch.float32, copy=True)))
        return grad, None, None


def linear(x_BSI: Tensor, weight: Weight, sink: GradientSink | None, cut: ReductionCut) -> Tensor:
    """x · weightᵀ; the weight's gradient goes to ``sink``, if there is one."""
    if not torch.is_grad_enabled():
        return forward_product(x_BSI, take_matrix(weight, x_BSI.dtype), cut)
    # The sum bypasses autograd, so the graph needs the weight where the input has no gradient.
    out: Tensor = _Linear.apply(x_BSI, weight, sink, cut)  # type: ignore[no-untyped-call]
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, sink: GradientSink) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens)
        ctx.sink = sink
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        ctx.sink.sums.do(partial(_add_rows, ctx.sink, tokens.flatten(), grad.flatten(0, -2)))
        return None, None, None


def _add_rows(sink: GradientSink, tokens: Tensor, grad: Tensor) -> None:
    sink.into.index_add_(0, tokens, sink.grid.put_(grad.to(torch.float32, copy=True)))


def exact_embedding(layer: nn.Embedding, sink: GradientSink) -> Forward:
    """The layer's new forward; the table's gradient goes to ``sink``."""

    def forward(tokens: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.embedding(tokens, layer.weight)
        out: Tensor = _Embedding.apply(tokens, layer.weight, sink)  # type: ignore[no-untyped-call]
        return out

    return forward


def add_tokens(sink: GradientSink, parts: Tensor) -> None:
    sink.into.add_(sink.grid.put_(parts).flatten(0, -2).sum(0))
