"""The loss of exact mode: cross-entropy with bits that do not depend on the cut of vocabulary and tokens.

B  sequences      D  width
S  positions      W  this rank's columns of the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.engine.exact.layer_settings import ExactLayers
from superstep.engine.exact.linear import ReductionCut, add_weight_gradient
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.kernels.cross_entropy import apply_temperature
from superstep.kernels.invariant import row_sum
from superstep.model.decoder import Head
from superstep.model.unit import UnitSpec
from superstep.numerics.fixed_point import exact_loss_sum
from superstep.numerics.invariant_matmul import product, tree_sum
from superstep.numerics.loss import IGNORE, own_columns
from superstep.numerics.objective import LossTarget
from superstep.numerics.soft_cap import exact_tanh, soft_cap, soft_cap_slope_
from superstep.plan.model.shape import ModelShape


def exact_loss(  # noqa: PLR0913
    h_BSD: Tensor,
    weight_WD: Tensor,
    aim: LossTarget,
    scale: float,
    sink: GradientSink | None,
    cut: ReductionCut,
    vocab: int,
    logit_cap: float | None = None,
) -> Tensor:
    """The summed losses of all tokens, fp64. Gradients are those of scale · sum; the weight's goes to ``sink``, if
    there is one. Columns from ``vocab`` on have no probability.
    """
    out: Tensor = _Loss.apply(h_BSD, weight_WD, aim, scale, sink, cut, vocab, logit_cap)  # type: ignore[no-untyped-call]
    return out


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,  # noqa: ANN401
        h_BSD: Tensor,
        weight_WD: Tensor,
        aim: LossTarget,
        scale: float,
        sink: GradientSink | None,
        cut: ReductionCut,
        vocab: int,
        logit_cap: float | None,
    ) -> Tensor:
        targets_BS = aim.targets
        scores_BSW = product(h_BSD.flatten(0, -2), weight_WD.t()).view(*targets_BS.shape, -1)
        slope_BSW = None
        if logit_cap is not None:
            scores_BSW = soft_cap(scores_BSW, logit_cap, exact_tanh)
            slope_BSW = soft_cap_slope_(scores_BSW.clone(), logit_cap)
        place = 0 if cut.group is None else cut.group.rank()
        scores_BSW = apply_temperature(scores_BSW, aim.temperature)
        scores_BSW[..., own_columns(weight_WD.shape[0], place, vocab) :] = float("-inf")
        first = place * weight_WD.shape[0]
        column_BS1 = (targets_BS - first).unsqueeze(-1)
        is_here_BS1 = (column_BS1 >= 0) & (column_BS1 < weight_WD.shape[0])
        column_BS1 = column_BS1.masked_fill(~is_here_BS1, 0)
        # All ranks but one add zero.
        own_BS1 = scores_BSW.gather(-1, column_BS1).masked_fill_(~is_here_BS1, 0.0)
        score_BS1 = _over_ranks(own_BS1, cut, dist.ReduceOp.SUM)
        exp_BSW, total_BS1, top_BS1 = totals_(scores_BSW, cut)
        is_valid_BS1 = (targets_BS != IGNORE).unsqueeze(-1)
        losses_BS1 = (total_BS1.log() + top_BS1 - score_BS1).masked_fill_(~is_valid_BS1, 0.0)
        factor_BS1 = is_valid_BS1
        if not aim.is_plain:
            loss_T, slope_T = aim.terms(losses_BS1.flatten().neg_())
            losses_BS1, factor_BS1 = loss_T.view_as(losses_BS1), slope_T.neg().view_as(losses_BS1)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            # A row's gradient is softmax - onehot, times minus the derivative.
            grad_BSW = exp_BSW.div_(total_BS1)
            grad_BSW.scatter_add_(-1, column_BS1, -is_here_BS1.to(grad_BSW.dtype))
            if slope_BSW is not None:
                grad_BSW.mul_(slope_BSW)
            factor_BS1 = scale / aim.temperature * factor_BS1
            ctx.save_for_backward(h_BSD, weight_WD, grad_BSW.mul_(factor_BS1).to(h_BSD.dtype))
            ctx.sink, ctx.cut = sink, cut
        return exact_loss_sum(losses_BS1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        h_BSD, weight_WD, dscores_BSW = ctx.saved_tensors
        cut: ReductionCut = ctx.cut
        dh = product(dscores_BSW.flatten(0, -2), weight_WD, cells=cut.cells_out)
        dh = cut.over_ranks(dh, is_cut=cut.is_cut_out)
        if ctx.sink is not None:
            ctx.sink.sums.do(partial(add_weight_gradient, ctx.sink, dscores_BSW, h_BSD.detach(), cut.chunks))
        return dh.to(h_BSD.dtype).view(h_BSD.shape), None, None, None, None, None, None, None


def totals_(scores_RW: Tensor, cut: ReductionCut) -> tuple[Tensor, Tensor, Tensor]:
    """Components of a row's log-probabilities; a column's is ``score - top - log(total)``.

    Args:
        scores_RW: this rank's columns of any number of rows; overwritten.
        cut: of the columns.

    Returns:
        exp(score - top), its sum over all columns of all ranks, and the largest score: [R, W], [R, 1], [R, 1].
    """
    top_R1 = _over_ranks(scores_RW.amax(-1, keepdim=True), cut, dist.ReduceOp.MAX)
    exp_RW = scores_RW.sub_(top_R1).exp_()
    cells = row_sum(exp_RW.unflatten(-1, (cut.cells_out, -1))).unbind(-2)
    return exp_RW, cut.over_ranks(tree_sum(cells), is_cut=cut.is_cut_out), top_R1


def _over_ranks(values: Tensor, cut: ReductionCut, op: dist.ReduceOp.RedOpType) -> Tensor:
    """A sum or maximum without rounding, so that its order does not matter."""
    if cut.group is not None and cut.is_cut_out:
        dist.all_reduce(values, op=op, group=cut.group)
    return values


def exact_user_loss(
    of: Callable[[Tensor, Tensor], Tensor] | None, out: Tensor, aim: LossTarget, scale: float
) -> Tensor:
    """The summed loss of a user's model, fp64, with gradients as ``exact_loss``.

    Args:
        of: the last unit's own loss, from its output and the targets; None for the cross entropy of logits [..., C].
        out: the last unit's output.
        aim: its targets.
        scale: factor of the gradients.
    """
    if of is not None:
        if aim.classify is not None:
            aim.classify(out, aim.targets)
        whole: Tensor = _UserLoss.apply(of(out, aim.targets), None, scale)  # type: ignore[no-untyped-call]
        return whole
    logits = apply_temperature(out, aim.temperature)
    if aim.classify is not None:
        aim.classify(logits, aim.targets)
    nats_T = F.cross_entropy(
        logits.flatten(0, -2).float(), aim.targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    loss: Tensor = _UserLoss.apply(-nats_T, aim, scale)  # type: ignore[no-untyped-call]
    return loss


class _UserLoss(torch.autograd.Function):
    """The exact sum of losses. ``values`` are log-probabilities, which ``aim`` turns into losses; without ``aim`` they
    are the losses themselves.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, aim: LossTarget | None, scale: float) -> Tensor:  # noqa: ANN401
        loss, slope = (values, torch.ones_like(values)) if aim is None else aim.terms(values)
        ctx.save_for_backward(slope * scale)
        return exact_loss_sum(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (slope,) = ctx.saved_tensors
        return slope * grad.to(slope.dtype), None, None


def build_exact_loss(
    head: nn.Module, spec: UnitSpec, exact: ExactLayers, decoder: ModelShape | None
) -> Callable[[Tensor, LossTarget, float], Tensor]:
    """The loss of the last unit's output: (output, aim, scale) to the sum over all tokens, fp64.

    Args:
        head: the last unit's module.
        spec: of the unit.
        exact: settings of the layers.
        decoder: ours; None for a user's model.
    """
    if decoder is None or spec.loss is not None:
        return partial(exact_user_loss, spec.loss)
    assert isinstance(head, Head)
    weight = head.get_parameter("lm_head.weight")
    cut, sink = exact.cut(spec.params["lm_head.weight"]), exact.sinks.get(weight)

    def loss(h: Tensor, aim: LossTarget, scale: float) -> Tensor:
        if aim.classify is not None:
            aim.classify(product(h.flatten(0, -2), weight.t()).view(*aim.targets.shape, -1), aim.targets)
        return exact_loss(h, weight, aim, scale, sink, cut, decoder.vocab, head.logit_cap)

    return loss
