"""Experts: many feed-forwards in parallel, each on its own rows of one tensor.

Rows are sorted by expert, and ``rows_E`` has the number of each; rows after the last expert's are padding. So one
product for all experts reads every weight and every row once, whatever the split.

    E  experts held here                T  tokens
    R  rows, sorted by expert           k  experts of a token
    I, O  inputs and outputs of a product
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.kernels.product import of_any_rows
from superstep.numerics.accumulate_product import add_product

AddGradient = Callable[[Tensor, Tensor, Tensor], object]
"""Takes the gradient of a grouped product's output [R, O], its input [R, I] and ``rows_E``."""

ALIGNED_WIDTH = 8
"""Numbers of bf16 in 16 bytes: torch's grouped kernel needs rows and columns in multiples of this."""

GROUPED_CAPABILITIES = (9, 10)
"""The major compute capabilities of GPUs that have this kernel."""


class GroupedLinear(nn.Module):
    """A linear for each expert, without bias: weights stacked as [E, O, I], or with ``is_transposed`` as [E, I, O]."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, is_transposed: bool = False) -> None:
        super().__init__()
        sides = (inputs, outputs) if is_transposed else (outputs, inputs)
        self.weight = nn.Parameter(torch.empty(experts, *sides))
        self.is_transposed = is_transposed
        nn.init.normal_(self.weight, 0.0, inputs**-0.5)

    def by_output(self, x: Tensor) -> Tensor:
        """A tensor of the weight's shape as [E, O, I]: a view."""
        return x.transpose(1, 2) if self.is_transposed else x

    def forward(self, x_RI: Tensor, rows_E: Tensor, part_R: Tensor | None = None) -> Tensor:
        """[R, O]; zeros for padding rows. The part of the sequence of each row has no effect here."""
        return grouped_linear(x_RI, self.by_output(self.weight), rows_E)


class Experts(nn.Module):
    """SwiGLU feed-forwards (Shazeer 2020). The number of experts here is read from the weights."""

    def __init__(self, experts: int, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = GroupedLinear(experts, width, ffn)
        self.up_proj = GroupedLinear(experts, width, ffn)
        self.down_proj = GroupedLinear(experts, ffn, width)
        self.act_fn = nn.SiLU()

    @property
    def held(self) -> int:
        """Number of experts held here."""
        return self.gate_proj.weight.shape[0]

    def forward(self, x_RD: Tensor, rows_E: Tensor, part_R: Tensor | None = None) -> Tensor:
        inner_RF = self.act_fn(self.gate_proj(x_RD, rows_E, part_R)) * self.up_proj(x_RD, rows_E, part_R)
        out_RD: Tensor = self.down_proj(inner_RF, rows_E, part_R)
        return out_RD


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, rows_E: Tensor, add: AddGradient | None = None) -> Tensor:
    """Each expert's rows times its weight, transposed: [R, O].

    Args:
        add: adds the weight's gradient to its buffer in the backward; autograd then gets none.
    """
    out: Tensor = _GroupedLinear.apply(x_RI, weight_EOI, rows_E, add)  # type: ignore[no-untyped-call]
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EOI: Tensor, rows_E: Tensor, add: AddGradient | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x_RI, weight_EOI, rows_E)
        ctx.add = add
        return products(x_RI, weight_EOI.transpose(1, 2), rows_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401
        x_RI, weight_EOI, rows_E = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        dx_RI = products(grad_RO, weight_EOI, rows_E) if ctx.needs_input_grad[0] else None
        dweight_EOI = None
        if ctx.add is not None:
            ctx.add(grad_RO, x_RI, rows_E)
        elif ctx.needs_input_grad[1]:
            dweight_EOI = torch.zeros_like(weight_EOI)
            add_outer_products(dweight_EOI, grad_RO, x_RI, rows_E)
        return dx_RI, dweight_EOI, None, None


def products(x_RI: Tensor, matrix_EIO: Tensor, rows_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix: [R, O]; zeros for padding rows."""
    if not len(x_RI):
        return x_RI.new_zeros(0, matrix_EIO.shape[2])
    if is_grouped(x_RI, matrix_EIO):
        return kernel_products(x_RI, matrix_EIO, rows_E)
    rows = rows_E.tolist()  # a GPU is waited for: each product is a call of its own, with a size that the host needs
    parts = [
        of_any_rows(part, matrix)
        for part, matrix in zip(x_RI.split([*rows, len(x_RI) - sum(rows)]), matrix_EIO, strict=False)
    ]
    return torch.cat((*parts, x_RI.new_zeros(len(x_RI) - sum(rows), matrix_EIO.shape[2])))


def add_outer_products(into_EOI: Tensor, grad_RO: Tensor, x_RI: Tensor, rows_E: Tensor) -> None:
    """Add each expert's gradᵀ · x to its part of ``into_EOI``, of any dtype.

    The one kernel for all experts returns bf16 only (torch 2.13): there each product is rounded once before it is
    added.
    """
    if not len(x_RI):
        return
    if is_grouped(grad_RO, x_RI):
        into_EOI.add_(kernel_outer_products(grad_RO, x_RI, rows_E))
        return
    rows = rows_E.tolist()  # as in ``products``
    rest = len(x_RI) - sum(rows)
    grads, xs = grad_RO.split([*rows, rest]), x_RI.split([*rows, rest])
    for into_OI, grad, x in zip(into_EOI, grads, xs, strict=False):
        add_product(into_OI, grad.t(), x)


def is_grouped(*factors: Tensor) -> bool:
    """Whether torch has one kernel for all experts here: bf16 on a GPU of compute capability 9.x or 10.x, in rows of
    whole 16 bytes. Elsewhere its operator uses a product for each expert too (``_grouped_mm_cuda`` in torch's
    ``aten/src/ATen/native/cuda/GroupedBlas.cpp``, 2.11 to 2.13).
    """
    return (
        all(x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % ALIGNED_WIDTH == 0 for x in factors)
        and torch.cuda.get_device_capability(factors[0].device)[0] in GROUPED_CAPABILITIES
    )


def kernel_products(x_RI: Tensor, matrix_EIO: Tensor, rows_E: Tensor) -> Tensor:
    """``products`` in one kernel, without a copy to the host; there is at least one row."""
    end_E = rows_E.cumsum(0, dtype=torch.int32)
    out_RO = F.grouped_mm(x_RI, matrix_EIO, offs=end_E)
    # The kernel leaves the padding rows uninitialised. Selective recompute keeps the kernel's result, which must not
    # change then.
    is_nobodys_R = torch.arange(len(x_RI), device=x_RI.device) >= end_E[-1]
    return out_RO.masked_fill(is_nobodys_R[:, None], 0.0)


def kernel_outer_products(grad_RO: Tensor, x_RI: Tensor, rows_E: Tensor) -> Tensor:
    """Each expert's gradᵀ · x in one kernel: [E, O, I]; zeros for an expert without rows. There is at least one row."""
    out_EOI = F.grouped_mm(grad_RO.t(), x_RI, offs=rows_E.cumsum(0, dtype=torch.int32))
    # On compute capability 10.0 the kernel leaves those of an expert without rows uninitialised (pytorch #172439).
    return out_EOI.masked_fill_((rows_E == 0)[:, None, None], 0.0)


def sort_by_expert(expert_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order of (token, choice) pairs as rows, [T·k], and the number of rows of each expert, [E].

    Within an expert the pairs keep their order; padding comes last. No size depends on the tensor's values, so that a
    GPU is not waited for, as ``bincount`` would.
    """
    expert_R = expert_Tk.flatten()
    sorted_R, order_R = expert_R.where(expert_R >= 0, experts).sort(stable=True)
    return order_R, torch.searchsorted(sorted_R, torch.arange(experts + 1, device=sorted_R.device)).diff()


def spread(x_TD: Tensor, order_R: Tensor, k: int) -> Tensor:
    """The rows of every (token, choice) pair in the given order: [T·k, D]."""
    out: Tensor = _Spread.apply(x_TD, order_R, k)  # type: ignore[no-untyped-call]
    return out


def unsort(y_RD: Tensor, order_R: Tensor) -> Tensor:
    """The rows in the order of the pairs again: ``out[order] = y``."""
    out: Tensor = _Unsort.apply(y_RD, order_R)  # type: ignore[no-untyped-call]
    return out


class _Spread(torch.autograd.Function):
    """Its backward is a permutation and a sum over k in order, where autograd's would scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, k: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(order_R)
        ctx.k = k
        return x_TD.index_select(0, order_R // k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (order_R,) = ctx.saved_tensors
        return in_order(_permute(grad_RD, order_R).unflatten(0, (-1, ctx.k))), None, None


def in_order(x_Tk: Tensor) -> Tensor:
    """The sum over dim 1, from the first to the last."""
    total, *rest = x_Tk.unbind(1)
    for part in rest:
        total = total + part
    return total


class _Unsort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, order_R: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(order_R)
        return _permute(y_RD, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (order_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, order_R), None


def _permute(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    return torch.empty_like(rows_RD).index_copy_(0, order_R, rows_RD)
