"""Mixtures of experts in exact mode: the same bits, whichever ranks hold a token and its experts.

The computation of a single token only needs products that do not depend on the number of rows. A weight's gradient sums
over tokens: those of one expert are taken in the order of the microbatch, a part of the sequence at a time; each part
is one product, rounded to a fixed grid. A part lies on one rank on every layout, and its rows reach the expert
together.

    T  tokens held here      R  rows, sorted by expert      E  experts held here
    k  experts of a token    I, O  inputs and outputs of a product
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superstep.engine.exact.linear import ReductionCut, add_bias, linear
from superstep.engine.layers.grad_accumulation import GradientSink, GradientSums
from superstep.engine.layers.implementation import Forward
from superstep.kernels.invariant import row_sum
from superstep.model.mixture.biased_experts import GroupedBias, add_grouped_bias, experts_of_rows
from superstep.model.mixture.experts import GroupedLinear, in_order
from superstep.model.moe import Gate
from superstep.numerics.invariant_matmul import product


def exact_grouped_linear(layer: GroupedLinear, sink: GradientSink) -> Forward:
    """The layer's new forward; its weight's gradient goes to ``sink``."""

    def forward(x_RI: Tensor, rows_E: Tensor, part_R: Tensor | None = None) -> Tensor:
        assert part_R is not None, "the exchange of exact mode says which part of which sequence each row is of"
        weight = layer.by_output(layer.weight)
        if not torch.is_grad_enabled():
            return _products(x_RI, weight.transpose(1, 2), rows_E.tolist())
        add = partial(_add_parts, sink, layer.is_transposed)
        out: Tensor = _GroupedLinear.apply(x_RI, weight, rows_E, part_R, add, sink.sums)  # type: ignore[no-untyped-call]
        return out

    return forward


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x_RI: Tensor,
        weight_EOI: Tensor,
        rows_E: Tensor,
        part_R: Tensor,
        add: Callable[[Tensor, Tensor, Tensor, Tensor], None],
        sums: GradientSums,
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, rows_E, part_R)
        ctx.add, ctx.sums, ctx.rows = (
            add,
            sums,
            rows_E.tolist(),
        )  # a GPU is waited for here, and not again in the backward pass
        return _products(x_RI, weight_EOI.transpose(1, 2), ctx.rows)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # noqa: ANN401
        x_RI, weight_EOI, rows_E, part_R = ctx.saved_tensors
        held = part_R[: sum(ctx.rows)]
        ctx.sums.do(partial(ctx.add, grad_RO, x_RI.detach(), rows_E, held))
        return _products(grad_RO, weight_EOI, ctx.rows), None, None, None, None, None


def _products(x_RI: Tensor, matrix_EIO: Tensor, rows: Sequence[int]) -> Tensor:
    """Each expert's rows times its matrix, [R, O]; zeros for padding rows."""
    nobodys = len(x_RI) - sum(rows)
    groups = zip(x_RI.split([*rows, nobodys]), matrix_EIO, strict=False)
    parts = [product(group, matrix).to(x_RI.dtype) if len(group) else group @ matrix for group, matrix in groups]
    return torch.cat((*parts, x_RI.new_zeros(nobodys, matrix_EIO.shape[2])))


def _add_parts(
    sink: GradientSink, is_transposed: bool, grad_RO: Tensor, x_RI: Tensor, rows_E: Tensor, part_R: Tensor
) -> None:
    order_R, starts = _by_part(rows_E, part_R)
    factors = (x_RI, grad_RO) if is_transposed else (grad_RO, x_RI)
    if sink.grid.add_grouped_products(sink.into, *factors, order_R, starts):
        return
    sizes, chunks = starts.diff().tolist(), (len(starts) - 1) // len(sink.into)
    pairs = zip(*(each.index_select(0, order_R).split(sizes) for each in factors), strict=True)
    for number, (left, right) in enumerate(pairs):
        if len(left):
            sink.grid.add(sink.into[number // chunks], product(left.t(), right))


def exact_grouped_bias(layer: GroupedBias, sink: GradientSink) -> Forward:
    """The new forward of experts' biases; the gradient of each row is put on the grid."""

    def forward(x_RO: Tensor, rows_E: Tensor) -> Tensor:
        out: Tensor = _GroupedBias.apply(x_RO, layer.weight, rows_E, sink)  # type: ignore[no-untyped-call]
        return out

    return forward


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RO: Tensor, bias_EO: Tensor, rows_E: Tensor, sink: GradientSink) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(rows_E)
        ctx.sink = sink
        return add_grouped_bias(x_RO, bias_EO, rows_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        ctx.sink.sums.do(partial(_add_rows, ctx.sink, grad_RO.to(torch.float32, copy=True), *ctx.saved_tensors))
        return grad_RO, None, None, None


def _add_rows(sink: GradientSink, grad_RO: Tensor, rows_E: Tensor) -> None:
    # Padding rows belong to no expert.
    expert_R = experts_of_rows(rows_E, len(grad_RO))
    is_held = expert_R < len(rows_E)
    sink.into.index_add_(0, expert_R[is_held], sink.grid.put_(grad_RO[is_held]))


def _by_part(rows_E: Tensor, part_R: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of every part of every expert, in order, and the start of each of these. No padding rows."""
    expert_R = torch.arange(len(rows_E), device=rows_E.device).repeat_interleave(rows_E, output_size=len(part_R))
    parts = int(part_R.max()) + 1 if len(part_R) else 1
    key_R = expert_R * parts + part_R
    rows = rows_E.new_zeros(len(rows_E) * parts).index_add_(0, key_R, torch.ones_like(key_R))
    return key_R.argsort(stable=True), torch.cat((rows.new_zeros(1), rows.cumsum(0)))


def exact_gate(layer: Gate, sinks: Mapping[str, GradientSink], parts: int) -> Forward:
    """The router's new forward: its logits are fp32; the gradient of its matrices sums over ``parts`` of a sequence."""
    cut = ReductionCut(cells_in=1, cells_out=1, is_cut_in=False, is_cut_out=False, chunks=parts, group=None)

    def logits(x_BsD: Tensor, weight: Tensor, sink: GradientSink) -> Tensor:
        return linear(x_BsD.float(), weight.float(), sink, cut)

    def forward(x_BsD: Tensor) -> Tensor:
        out = logits(x_BsD, layer.weight, sinks["weight"])
        if layer.bias is not None:
            out = add_bias(out, layer.bias.float(), sinks["bias"])
        if layer.spread is None:
            return out
        return torch.cat((out, logits(x_BsD, layer.spread, sinks["spread"])), -1)

    return forward


def exact_combine(weight_Tk: Tensor, y_TkD: Tensor) -> Tensor:
    """The experts' outputs, weighted and summed from the first choice to the last: [T, D]."""
    out: Tensor = _Combine.apply(weight_Tk, y_TkD)  # type: ignore[no-untyped-call]
    return out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_Tk: Tensor, y_TkD: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(weight_Tk, y_TkD)
        return in_order(weight_Tk.float().unsqueeze(-1) * y_TkD.float()).to(y_TkD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        weight_Tk, y_TkD = ctx.saved_tensors
        grad_T1D = grad_TD.float().unsqueeze(1)
        dweight_Tk = row_sum(grad_T1D * y_TkD.float()).squeeze(-1)
        return dweight_Tk.to(weight_Tk.dtype), (grad_T1D * weight_Tk.float().unsqueeze(-1)).to(y_TkD.dtype)
