"""A causal convolution over a few tokens, of each number by itself.

    y_t = Σ over k of w_k · x_(t-k)              k = 0 ... W - 1; tokens before the document's start count as zeros

A rank may hold several runs of the sequence. ``Neighbours`` gives the tokens before and after each of them, so that the
sum of each token has one order on every layout.

    B  rows    R  runs of a rank    L  tokens of a run    C  numbers of a token    W  taps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Neighbours(Protocol):
    """The tokens beside a rank's runs of the sequence."""

    def before(self, x_BSC: Tensor, count: int) -> Tensor:
        """Each run after the ``count`` tokens before it, [B, R, count + L, C]; zeros where there are none."""

    def after(self, x_BSC: Tensor, count: int) -> Tensor:
        """Each run before the ``count`` tokens after it, [B, R, L + count, C]; zeros where there are none."""


@dataclass(frozen=True, slots=True)
class NoNeighbours:
    """Of whole sequences."""

    def before(self, x_BSC: Tensor, count: int) -> Tensor:
        return F.pad(x_BSC, (0, 0, count, 0)).unsqueeze(1)

    def after(self, x_BSC: Tensor, count: int) -> Tensor:
        return F.pad(x_BSC, (0, 0, 0, count)).unsqueeze(1)


AddTaps = Callable[[Iterator[tuple[int, Tensor]]], object]
"""Adds, for each tap, what every token contributes to its gradient: [B, R, L, C], fp32."""


class Convolve(Protocol):
    def __call__(self, x_BSC: Tensor, weight_C1W: Tensor, add: AddTaps | None = None, /) -> Tensor:
        """The convolution, [B, S, C]; ``add`` takes the weight's gradient, and autograd then gets none."""


class ShortConvolution(nn.Module):
    """The convolution, without a bias; a token sees those before it through ``convolve``."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, taps).normal_(0.0, taps**-0.5))

    def forward(self, x_BSC: Tensor, convolve: Convolve) -> Tensor:
        return convolve(x_BSC, self.weight)


def convolve(
    x_BSC: Tensor,
    weight_C1W: Tensor,
    neighbours: Neighbours,
    positions: Tensor | None = None,
    add: AddTaps | None = None,
) -> Tensor:
    """The convolution, [B, S, C].

    Args:
        neighbours: of the runs.
        positions: within the document, of each run's tokens and of the W - 1 after it, [B, R, L + W - 1]; None for one
            document in each row.
        add: see ``Convolve``.
    """
    out: Tensor = _Convolution.apply(x_BSC, weight_C1W, neighbours, positions, add)  # type: ignore[no-untyped-call]
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        neighbours: Neighbours,
        positions: Tensor | None,
        add: AddTaps | None,
    ) -> Tensor:
        taps = weight.shape[-1]
        runs = neighbours.before(x, taps - 1)
        ctx.save_for_backward(runs, weight, positions)
        ctx.neighbours, ctx.add = neighbours, add
        total: Tensor | None = None
        for tap, part in _list_taps(runs, positions, taps):
            product = part * weight[:, 0, tap].to(part.dtype)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total.to(x.dtype).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # noqa: ANN401
        runs, weight, positions = ctx.saved_tensors
        taps = weight.shape[-1]
        later = ctx.neighbours.after(grad, taps - 1)
        length = later.shape[2] - (taps - 1)
        dx: Tensor | None = None
        for back in range(taps):
            part = _widen(later[:, :, back : back + length]) * weight[:, 0, taps - 1 - back].float()
            if positions is not None and back:
                part.mul_((positions[:, :, back : back + length] >= back).unsqueeze(-1))
            dx = part if dx is None else dx.add_(part)
        assert dx is not None
        own = _widen(grad.unflatten(1, (runs.shape[1], length)))
        contributions = ((tap, part.mul(own)) for tap, part in _list_taps(runs.detach(), positions, taps))
        dweight = None
        if ctx.add is not None:
            ctx.add(contributions)
        elif ctx.needs_input_grad[1]:
            dweight = torch.empty_like(weight)
            for tap, part in contributions:
                dweight[:, 0, tap] = part.sum((0, 1, 2))
        return dx.to(grad.dtype).flatten(1, 2), dweight, None, None, None


def _list_taps(runs: Tensor, positions: Tensor | None, taps: int) -> Iterator[tuple[int, Tensor]]:
    """For each tap, the tokens that it multiplies, [B, R, L, C], in fp32 or wider; the own token first."""
    length = runs.shape[2] - (taps - 1)
    for back in range(taps):
        at = taps - 1 - back
        part = _widen(runs[:, :, at : at + length])
        if positions is not None and back:
            part = part * (positions[:, :, :length] >= back).unsqueeze(-1)
        yield at, part


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
