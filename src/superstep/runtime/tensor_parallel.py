"""Tensor parallelism put on a plain module from outside (Shoeybi 2019), with sequence parallelism (Korthikanti 2022).

The table of logical axes says which matrices were cut. What happens at the seams follows from it:

    embedding cut over vocab       look up the own rows, zeros elsewhere, sum over tp
    norm on the residual stream    its output enters a region where heads or ffn are split
    linear cut over its output     nothing: each rank has its own columns
    linear cut over its input      each rank has a part of the sum: sum over tp

Without sequence parallelism the residual stream is whole on every rank: entering is the identity (and sums
gradients going back), leaving is an all-reduce. With it the stream is split over the sequence: entering gathers it,
leaving reduce-scatters it, and the norms between work on S / tp tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from superstep.model.unit import UnitSpec
from superstep.numerics.loss import IGNORE
from superstep.plan.rules import Rules
from superstep.runtime.collectives import gather_sequence, scatter_sequence
from superstep.runtime.exact import GatherWhole, KeepOwn, pass_on
from superstep.runtime.mesh import Group

Forward = Callable[[Tensor], Tensor]


class _Gather(torch.autograd.Function):
    """Forward gathers the sequence, backward reduce-scatters its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return scatter_sequence(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Forward reduce-scatters along the sequence, backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gather_sequence(grad, ctx.group), None


class _Enter(torch.autograd.Function):
    """Forward is the identity, backward sums over tp (the f of Shoeybi 2019, fig. 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Forward sums over tp, backward is the identity (the g of Shoeybi 2019, fig. 3)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


Border = Callable[[Tensor, Group], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """What happens at the seams: entering a split region, leaving it after a product, and after a lookup."""

    enter: Border
    leave: Border
    leave_lookup: Border


def borders(*, sequence_parallel: bool) -> Borders:
    """Those of fast mode."""
    enter, leave = (_Gather.apply, _Scatter.apply) if sequence_parallel else (_Enter.apply, _Leave.apply)
    return Borders(enter=enter, leave=leave, leave_lookup=leave)


def exact_borders(*, sequence_parallel: bool) -> Borders:
    """Those of exact mode: products are whole when they leave. A lookup adds zeros to one number, which is exact."""
    enter, leave = (GatherWhole.apply, KeepOwn.apply) if sequence_parallel else (pass_on, pass_on)
    return Borders(enter=enter, leave=leave, leave_lookup=borders(sequence_parallel=sequence_parallel).leave)


def split(module: nn.Module, spec: UnitSpec, group: Group, rules: Rules, seams: Borders) -> None:
    """Change the forward of the module's layers, by the unit's table of axes. The weights are cut already."""
    for local, param in spec.params.items():
        path, _, leaf = local.rpartition(".")
        layer = module.get_submodule(path)
        is_cut = [rules.cut(axis) == "tp" for axis in param.axes]
        if isinstance(layer, nn.Embedding) and is_cut[0]:
            _replace(layer, _vocabulary_lookup(layer, group, seams.leave_lookup))
        elif isinstance(layer, nn.Linear) and leaf == "weight" and is_cut[1]:
            _replace(layer, _then(layer.forward, seams.leave, group))
        elif param.axes == ("norm",):
            _replace(layer, _then(layer.forward, seams.enter, group))


def _replace(layer: nn.Module, forward: Forward) -> None:
    # An attribute of the instance, found before the class's method: the module's code stays as it is.
    layer.forward = forward


def _then(inner: Forward, outer: Border, group: Group) -> Forward:
    def forward(x: Tensor) -> Tensor:
        return outer(inner(x), group)

    return forward


def _vocabulary_lookup(layer: nn.Embedding, group: Group, leave: Border) -> Forward:
    inner = layer.forward

    def forward(tokens_BS: Tensor) -> Tensor:
        rows = layer.weight.shape[0]
        local_BS = tokens_BS - group.rank() * rows
        is_elsewhere = (local_BS < 0) | (local_BS >= rows)
        h_BSD = inner(local_BS.masked_fill(is_elsewhere, 0)).masked_fill(is_elsewhere[..., None], 0.0)
        return leave(h_BSD, group)

    return forward


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits cut over the vocabulary; no rank ever sees a whole row (Shoeybi 2019, sec. 3)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        scores_NV = logits_NV.float()
        top_N = scores_NV.amax(1)
        dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
        exp_NV = (scores_NV - top_N[:, None]).exp_()
        columns = scores_NV.shape[1]
        local_N = targets_N - group.rank() * columns
        is_here_N = (local_N >= 0) & (local_N < columns)
        local_N = local_N.masked_fill(~is_here_N, 0)
        score_N = scores_NV.gather(1, local_N[:, None])[:, 0].masked_fill(~is_here_N, 0.0)
        sums = torch.stack((exp_NV.sum(1), score_N))
        dist.all_reduce(sums, group=group)
        is_valid_N = targets_N != IGNORE
        ctx.save_for_backward(exp_NV.div_(sums[0][:, None]), local_N, is_here_N, is_valid_N)
        ctx.dtype = logits_NV.dtype
        return (sums[0].log() + top_N - sums[1]).masked_fill(~is_valid_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        probability_NV, local_N, is_here_N, is_valid_N = ctx.saved_tensors
        grad_NV = probability_NV.clone()
        grad_NV.scatter_add_(1, local_N[:, None], -is_here_N.to(grad_NV.dtype)[:, None])
        grad_NV.mul_((grad * is_valid_N)[:, None])
        return grad_NV.to(ctx.dtype), None, None


def vocabulary_cross_entropy_sum(logits_BSV: Tensor, targets_BS: Tensor, group: Group) -> Tensor:
    """The sum of the cross-entropy over valid targets, fp32; ``logits_BSV: [B, S, V/tp]``."""
    loss: Tensor = _VocabularyCrossEntropy.apply(logits_BSV.flatten(0, 1), targets_BS.flatten(), group)  # type: ignore[no-untyped-call]
    return loss
