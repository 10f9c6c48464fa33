"""Objective: a loss of tokens' log-probabilities, independent of the layout.

Each layout computes a target's log-probability in its own way: in chunks, over a cut vocabulary, in exact sums, and
knows no loss. An objective knows nothing else: from each token's log-probability and streams it gives the loss and the
derivative, and a row's gradient by its logits is then

    dL/dz_v = dL/dlogp · (onehot_v - softmax_v)

which every layout can compute. So one objective is right on all of them, and a new one is a function of a few lines.

    B  sequences      T  tokens: B · S in a row
    S  positions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from superstep.numerics.loss import IGNORE

Streams = Mapping[str, Tensor]
"""By name, a number for each target, fp32, cut like the targets."""


class Objective(Protocol):
    """A loss that is a sum over tokens, each term of its own log-probability and streams only."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The required streams."""
        ...

    @property
    def sums(self) -> tuple[str, ...]:
        """Names in ``watch`` that are reported as means after a step."""
        ...

    @property
    def maxima(self) -> tuple[str, ...]:
        """Names in ``watch`` that are reported as maxima; none is below zero."""
        ...

    def terms(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        """Each token's loss and its derivative by ``logp_T``; does not change its arguments."""
        ...

    def watch(self, logp_T: Tensor, streams: Streams) -> Mapping[str, Tensor]:
        """A number for each token, by each name in ``sums`` and ``maxima``."""
        ...


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """-w · logp with a stream ``weights``, of any sign; without one w = 1."""

    reads: tuple[str, ...] = field(default=(), init=False)
    sums: tuple[str, ...] = field(default=(), init=False)
    maxima: tuple[str, ...] = field(default=(), init=False)

    def terms(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        slope_T = -streams["weights"] if "weights" in streams else torch.full_like(logp_T, -1.0)
        return slope_T * logp_T, slope_T

    def watch(self, logp_T: Tensor, streams: Streams) -> Mapping[str, Tensor]:
        """Nothing: the loss says it all."""
        return {}


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Some tokens, as they were trained on.

    Attributes:
        logp_T: log-probabilities of the targets, fp32; zero where there is none.
        loss_T: losses, likewise.
        counts_T: whether a token has a target.
    """

    logp_T: Tensor  # noqa: N815 - the suffix names the dims
    loss_T: Tensor  # noqa: N815
    counts_T: Tensor  # noqa: N815
    streams: Streams


Tell = Callable[[TrainedTokens], None]
Classify = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class LossTarget:
    """The targets and the loss of a microbatch.

    Attributes:
        targets: the ids [B, S], or any class numbers; IGNORE where there is no target.
        streams: of the targets' shape.
        tell: called with the tokens, in order, at once or in parts.
        temperature: divides the logits first.
        classify: called with whole logits [..., C] and the targets.
    """

    targets: Tensor
    streams: Streams = field(default_factory=dict)
    objective: Objective = CROSS_ENTROPY
    tell: Tell | None = None
    temperature: float = 1.0
    classify: Classify | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this is the cross entropy of every target, which needs no single tokens."""
        return isinstance(self.objective, CrossEntropy) and "weights" not in self.streams and self.tell is None

    @property
    def token_terms(self) -> Callable[[Tensor, slice], tuple[Tensor, Tensor]] | None:
        """``terms``, or None where single tokens are not needed."""
        return None if self.is_plain else self.terms

    def cut(self, part: Callable[[Tensor], Tensor]) -> LossTarget:
        """The same for a part of the tokens."""
        streams = {name: part(stream) for name, stream in self.streams.items()}
        return replace(self, targets=part(self.targets), streams=streams)

    def terms(self, logp_T: Tensor, at: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Each token's loss and its derivative by the log-probability, fp32; zero where there is no target.

        Args:
            logp_T: of some tokens in a row; any number where there is no target.
            at: their places among all tokens.
        """
        counts_T = self.targets.flatten()[at] != IGNORE
        streams = {name: stream.flatten()[at] for name, stream in self.streams.items()}
        logp_T = logp_T.where(counts_T, 0.0)
        loss_T, slope_T = (x.where(counts_T, 0.0) for x in self.objective.terms(logp_T, streams))
        if self.tell is not None:
            self.tell(TrainedTokens(logp_T=logp_T, loss_T=loss_T, counts_T=counts_T, streams=streams))
        return loss_T, slope_T


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logp_T: Tensor, aim: LossTarget) -> Tensor:
        loss_T, slope_T = aim.terms(logp_T)
        ctx.save_for_backward(slope_T)
        return loss_T.sum()

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, grad: Tensor) -> tuple[Tensor, None]:
        (slope_T,) = ctx.saved_tensors
        return grad * slope_T, None


def objective_sum(logp_T: Tensor, aim: LossTarget) -> Tensor:
    """The sum of all tokens' losses, with the objective's derivative for autograd."""
    loss: Tensor = _Sum.apply(logp_T, aim)  # type: ignore[no-untyped-call]
    return loss
