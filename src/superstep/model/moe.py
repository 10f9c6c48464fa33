"""A mixture of experts in place of a block's feed-forward, as one would write it for one device.

    y = Σ over the token's experts of weight · expert(x)   (+ shared experts, which process every token)

The losses of the router are in no output: they enter the backward pass where the block's output does, so that a unit
stays one tensor in and one tensor out. The training's loss is

    cross entropy / valid tokens + Σ over layers of mean over sequences of (balance_weight · balance + z_weight · z)

    B  sequences               E  experts        D  width of the residual stream
    s  positions held here     k  experts of a token
    S  positions               T  tokens held here: B · s
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.feedforward import FeedForward
from superstep.model.mixture.biased_experts import BiasedExperts
from superstep.model.mixture.expert_dispatch import ExpertDispatch, LayerRouterCounts
from superstep.model.mixture.experts import Experts
from superstep.model.mixture.router import NOBODY, Routing, choices, noise_width, route
from superstep.numerics.sending import send
from superstep.plan.model.shape import ModelShape


class Gate(nn.Module):
    """The router's logits, in fp32 for any dtype of ``x``: rounded to bf16, near ties are decided differently and
    training becomes unstable (Fedus 2021, sec. 2.4; Zoph 2022, sec. 3).
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.moe is not None
        std = shape.width**-0.5
        self.weight = nn.Parameter(torch.empty(shape.moe.experts, shape.width).normal_(0.0, std))
        spare = shape.moe.logits - shape.moe.experts
        self.spread = nn.Parameter(torch.empty(spare, shape.width).normal_(0.0, std)) if spare else None
        """noisy-topk: of the noise, for each expert (Shazeer 2017, eq. 4)."""
        has_choice = shape.moe.router == "sigmoid"
        self.e_score_correction_bias = nn.Parameter(torch.zeros(shape.moe.experts)) if has_choice else None
        """sigmoid: added to the scores by which experts are chosen."""
        self.bias = nn.Parameter(torch.zeros(shape.moe.experts)) if shape.style.expert_biases else None

    def forward(self, x_BsD: Tensor) -> Tensor:
        """[B, s, moe.logits]."""
        logits_BsE = wide_linear(x_BsD, self.weight)
        if self.bias is not None:
            logits_BsE = logits_BsE + self.bias.to(logits_BsE.dtype)
        return logits_BsE if self.spread is None else torch.cat((logits_BsE, wide_linear(x_BsD, self.spread)), -1)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in fp32 or wider. Tensors for the backward pass stay in the dtype of ``x``."""
    return cast(Tensor, _WideLinear.apply(x, weight))  # type: ignore[no-untyped-call]


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        return F.linear(_wide(x), _wide(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        # The weight's gradient is not cast: autograd rounds it, or keeps it where weight.grad_dtype is fp32.
        return (grad @ _wide(weight)).to(x.dtype), grad.flatten(0, -2).t() @ _wide(x).flatten(0, -2)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class MixtureOfExperts(nn.Module):
    """The block's feed-forward, each token through a few of many experts.

    Args:
        shape: the model's.
        layer: the block's number.
    """

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        assert shape.moe is not None
        self.moe, self.layer = shape.moe, layer
        self.gate = Gate(shape)
        self.experts = _make_experts(shape, shape.moe.experts)
        shared = shape.moe.shared_experts
        # Shared experts all process the same tokens, so they are one wide expert.
        self.shared_experts = FeedForward(shape.width, shared * shape.ffn) if shared else None
        has_gate = shared and shape.style.shared_gate
        self.shared_expert_gate = nn.Linear(shape.width, 1, bias=False) if has_gate else None
        self.gate_fn = nn.Sigmoid() if has_gate else nn.Identity()

    def forward(self, x_BsD: Tensor, *, exchange: ExpertDispatch) -> Tensor:
        routing = self.route(x_BsD, exchange)
        expert_Tk = exchange.share(routing.expert).flatten(0, 1)
        weight_Tk = exchange.share(routing.weight).flatten(0, 1).to(x_BsD.dtype)
        if self.gate.e_score_correction_bias is not None:
            weight_Tk = with_load(weight_Tk, self.gate.e_score_correction_bias, expert_Tk)
        y_TkD = exchange.run(x_BsD.flatten(0, 1), expert_Tk, self.experts)
        y_BsD = self.combine(weight_Tk, y_TkD).view_as(x_BsD)
        if self.shared_experts is not None:
            shared_BsD = self.shared_experts(x_BsD)
            if self.shared_expert_gate is not None:
                shared_BsD = self.gate_fn(self.shared_expert_gate(x_BsD)) * shared_BsD
            y_BsD = y_BsD + shared_BsD
        loss_B = self.moe.balance_weight * routing.balance + self.moe.z_weight * routing.z
        now = exchange.now
        return with_loss(y_BsD, now.loss_scale * loss_B.sum() / now.batch_sequences)

    def combine(self, weight_Tk: Tensor, y_TkD: Tensor) -> Tensor:
        """The weighted sum of the experts' outputs: [T, D]."""
        return (weight_Tk.unsqueeze(1) @ y_TkD).squeeze(1)

    def route(self, x_BsD: Tensor, exchange: ExpertDispatch) -> Routing:
        """The routing of the whole sequences that contain these tokens; the exchange receives its statistics."""
        logits_BSE = exchange.whole(self.gate(x_BsD))
        noise_BSE = exchange.noise(self.layer, logits_BSE.shape[1], noise_width(self.moe))
        if noise_BSE is not None:
            noise_BSE = send(noise_BSE, logits_BSE.device).to(logits_BSE.dtype)
        routing = route(self.moe, logits_BSE, noise_BSE, self.gate.e_score_correction_bias)
        is_dropped = (routing.expert == NOBODY) & (routing.choice != NOBODY)
        dropped_BSk = routing.choice.where(is_dropped, NOBODY)
        exchange.tell(
            self.layer,
            LayerRouterCounts(
                chosen=choices(routing.choice, self.moe.experts).sum(0),
                dropped=choices(dropped_BSk, self.moe.experts).sum(0),
                balance=routing.balance.detach().sum(),
                z=routing.z.detach().sum(),
            ),
        )
        return routing


def _make_experts(shape: ModelShape, experts: int) -> Experts | BiasedExperts:
    if not shape.style.expert_biases:
        return Experts(experts, shape.width, shape.ffn)
    assert shape.style.gate_limit is not None
    return BiasedExperts(experts, shape.width, shape.ffn, shape.style.gate_slope, shape.style.gate_limit)


def with_loss(y: Tensor, loss: Tensor) -> Tensor:
    """``y`` unchanged; in the backward ``loss`` gets the gradient 1, as if it were added to the training's loss."""
    return cast(Tensor, _WithLoss.apply(y, loss))  # type: ignore[no-untyped-call]


LOAD_UNIT = 2.0**-30
"""A gradient of one row: sums of them are exact in exact mode's grid."""


def with_load(weight_Tk: Tensor, bias_E: Tensor, expert_Tk: Tensor) -> Tensor:
    """The weights unchanged; in the backward the bias of each expert gets what its load lacks to the mean, E · rows
    long: the update takes its sign alone (Wang 2024, algorithm 1).
    """
    return cast(Tensor, _WithLoad.apply(weight_Tk, bias_E, expert_Tk))  # type: ignore[no-untyped-call]


class _WithLoad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_Tk: Tensor, bias_E: Tensor, expert_Tk: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(expert_Tk)
        ctx.experts, ctx.dtype = len(bias_E), bias_E.dtype
        return weight_Tk.view_as(weight_Tk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        (expert_Tk,) = ctx.saved_tensors
        rows_E = choices(expert_Tk[None], ctx.experts)[0]
        missing_E = expert_Tk.numel() - ctx.experts * rows_E
        return grad, missing_E.to(torch.float32).mul_(LOAD_UNIT).to(ctx.dtype), None


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:  # noqa: ANN401
        ctx.like = loss.dtype, loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device)
