"""gpt-oss's experts: with biases and clamped gates.

    gate, up = clamp(gate_up(x) + bias),   y = down((up + 1) · gate · sigmoid(slope · gate)) + bias

Gate and up are one matrix, their columns in turn, and matrices are stored as [E, inputs, outputs], as in the family's
files.

    E  experts held here               F  inner width
    R  rows, sorted by expert          G  2 · F: gate and up in turn
    D  width
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from superstep.model.mixture.experts import GroupedLinear


class GroupedBias(nn.Module):
    """A bias for each expert, added to its rows: [E, O]. Padding rows stay as they are."""

    def __init__(self, experts: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, outputs))

    def forward(self, x_RO: Tensor, rows_E: Tensor) -> Tensor:
        return cast(Tensor, _GroupedBias.apply(x_RO, self.weight, rows_E))  # type: ignore[no-untyped-call]


def experts_of_rows(rows_E: Tensor, rows: int) -> Tensor:
    """The expert of each row, [R]; E for padding rows. No GPU is waited for."""
    places = torch.arange(rows, device=rows_E.device)
    return torch.searchsorted(rows_E.cumsum(0), places, right=True)


def add_grouped_bias(x_RO: Tensor, bias_EO: Tensor, rows_E: Tensor) -> Tensor:
    """``x`` with the bias of each row's expert."""
    expert_R = experts_of_rows(rows_E, len(x_RO))
    added_RO = bias_EO.index_select(0, expert_R.clamp(max=len(bias_EO) - 1))
    return x_RO + added_RO.masked_fill_((expert_R == len(bias_EO))[:, None], 0.0)


class _GroupedBias(torch.autograd.Function):
    """Its gradient is a product with a matrix of zeros and ones: a sum in one order, where autograd's would scatter."""

    @staticmethod
    def forward(ctx: Any, x_RO: Tensor, bias_EO: Tensor, rows_E: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(rows_E)
        ctx.experts = len(bias_EO)
        return add_grouped_bias(x_RO, bias_EO, rows_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        (rows_E,) = ctx.saved_tensors
        expert_R = experts_of_rows(rows_E, len(grad_RO))
        is_of_ER = expert_R == torch.arange(ctx.experts, device=expert_R.device)[:, None]
        return grad_RO, is_of_ER.to(grad_RO.dtype) @ grad_RO, None


class ClampedGate(nn.Module):
    """(up + 1) · gate · sigmoid(slope · gate), with the gate at most ``limit``, and up at most that in size."""

    def __init__(self, slope: float, limit: float) -> None:
        super().__init__()
        self.slope, self.limit = slope, limit

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        """[R, F]."""
        return cast(Tensor, _ClampedGate.apply(gate_up_RG, self.slope, self.limit))  # type: ignore[no-untyped-call]


class _ClampedGate(torch.autograd.Function):
    """By exponential and division: an element's bits do not depend on its place, as those of torch's sigmoid do."""

    @staticmethod
    def forward(ctx: Any, gate_up_RG: Tensor, slope: float, limit: float) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(gate_up_RG)
        ctx.slope, ctx.limit = slope, limit
        gate, up = _parts(gate_up_RG)
        gate.clamp_(max=limit)
        share = _sigmoid(gate, slope)
        return up.clamp_(-limit, limit).add_(1.0).mul_(gate.mul_(share)).to(gate_up_RG.dtype)

    @staticmethod
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gate_up_RG,) = ctx.saved_tensors
        gate, up = _parts(gate_up_RG)
        is_low, is_between = gate <= ctx.limit, up.abs() <= ctx.limit
        gate.clamp_(max=ctx.limit)
        share, grad = _sigmoid(gate, ctx.slope), grad_RF.float()
        out_RG = torch.empty_like(gate_up_RG)
        out_RG[..., 1::2] = (gate * share).mul_(grad).mul_(is_between)
        slope = (1.0 - share).mul_(gate).mul_(ctx.slope).add_(1.0).mul_(share)
        out_RG[..., ::2] = slope.mul_(up.clamp_(-ctx.limit, ctx.limit).add_(1.0)).mul_(grad).mul_(is_low)
        return out_RG, None, None


def _parts(gate_up_RG: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of gate and up, fp32."""
    gate, up = gate_up_RG.unflatten(-1, (-1, 2)).unbind(-1)
    return gate.to(torch.float32, copy=True).contiguous(), up.to(torch.float32, copy=True).contiguous()


def _sigmoid(gate: Tensor, slope: float) -> Tensor:
    return 1.0 / gate.mul(-slope).exp_().add_(1.0)


class BiasedExperts(nn.Module):
    """Experts with biases, and gates as in ``ClampedGate``. The number of experts here is read from the weights."""

    def __init__(self, experts: int, width: int, ffn: int, slope: float, limit: float) -> None:
        super().__init__()
        self.gate_up_proj = GroupedLinear(experts, width, 2 * ffn, is_transposed=True)
        self.gate_up_bias = GroupedBias(experts, 2 * ffn)
        self.act_fn = ClampedGate(slope, limit)
        self.down_proj = GroupedLinear(experts, ffn, width, is_transposed=True)
        self.down_bias = GroupedBias(experts, width)

    @property
    def held(self) -> int:
        """Number of experts held here."""
        return self.gate_up_proj.weight.shape[0]

    def forward(self, x_RD: Tensor, rows_E: Tensor, part_R: Tensor | None = None) -> Tensor:
        gate_up_RG = self.gate_up_bias(self.gate_up_proj(x_RD, rows_E, part_R), rows_E)
        out_RD: Tensor = self.down_bias(self.down_proj(self.act_fn(gate_up_RG), rows_E, part_R), rows_E)
        return out_RD
