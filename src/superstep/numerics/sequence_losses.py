"""Losses of whole answers, by two passes: the first gives the weights of tokens for the second.

Such a loss is no sum over tokens, and a context-parallel rank has only a part of an answer. But its gradient is a sum:

    dL = sum over t of (dL/dl_t) · dl_t

The first pass gives the log-probabilities l_t of all tokens (``Engine.logprobs``), the same on every rank; here they
become w_t = -dL/dl_t; the second pass is the cross entropy with these weights, -sum w_t · l_t, with the gradient of L.
All is fp64 and on the host, with one number for each token.

    N  answers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from superstep.errors import ConfigError, DataError
from superstep.numerics.objective import Streams
from superstep.numerics.policy import PolicyLoss, kl_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLossResult:
    """The result for a loss of whole answers.

    Attributes:
        weights: the stream ``weights`` of the second pass, fp32, of the shape of the log-probabilities.
        loss: of all answers together, not divided; not the second pass's loss.
        measures: means over the answers, and maxima, by name.
    """

    weights: Tensor
    loss: float
    measures: Mapping[str, float]


def sequence_policy(
    policy: PolicyLoss,
    logp: Tensor,
    streams: Streams,
    answer: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
) -> SequenceLossResult:
    """``PolicyLoss`` of whole answers, with the ratio s = exp(mean over t of (l_t - old_t)), as in GSPO (Zheng 2025,
    eq. 7): L = sum over answers of -min(s A, clip(s) A); the correction is of the same mean. The distance from the
    reference stays a token's, averaged over its answer.

    Args:
        policy: with a ``surrogate`` of a ratio.
        logp: of every target now; any shape.
        streams: ``old``, and the policy's other streams but advantages and weights; of that shape.
        answer: the answer of each target, from 0; -1 for targets that do not count. int64, of that shape.
        advantages: of each answer: [N].
        weights: a factor of each answer's loss: [N]; 0 leaves it out, None means 1.
    """
    logp_T, answer_T, lengths_N = _flat(logp, answer, len(advantages))
    of_tokens = {name: streams[name].flatten().double().cpu() for name in policy.reads if name != "advantages"}
    means = {name: _sums(stream_T, answer_T, lengths_N) / lengths_N for name, stream_T in of_tokens.items()}
    means["advantages"] = advantages.double().cpu()
    weight_N = torch.ones_like(lengths_N) if weights is None else weights.double().cpu()
    counts_N, whole = weight_N != 0, replace(policy, kl_coef=0.0)
    mean_N = _sums(logp_T, answer_T, lengths_N) / lengths_N
    loss_N, slope_N = whole.terms(mean_N, means)
    watched = whole.watch(mean_N, means)
    slope_T = _each(weight_N * slope_N / lengths_N, answer_T)
    measures = {name: _mean(watched[name], counts_N) for name in whole.sums}
    measures |= {name: float(watched[name].where(counts_N, 0.0).amax()) for name in whole.maxima}
    if policy.kl_coef:
        distance_T, pull_T = kl_terms(policy.kl, logp_T, of_tokens["reference"])
        distance_N = _sums(distance_T, answer_T, lengths_N) / lengths_N
        loss_N = loss_N + policy.kl_coef * distance_N
        share_T = policy.kl_coef * _each(weight_N / lengths_N, answer_T)
        slope_T = slope_T + (share_T * pull_T).where(answer_T >= 0, 0.0)
        measures["reference_kl"] = _mean(distance_N, counts_N)
    return SequenceLossResult(weights=_weights(slope_T, logp), loss=float((weight_N * loss_N).sum()), measures=measures)


def _mean(values_N: Tensor, counts_N: Tensor) -> float:
    """The mean over the answers that count; 0 of none."""
    return float(values_N.double().where(counts_N, 0.0).sum() / counts_N.sum().clamp(min=1))


def dpo(
    logp: Tensor, reference: Tensor, answer: Tensor, pairs: int, *, beta: float, label_smoothing: float = 0.0
) -> SequenceLossResult:
    """Direct preference optimisation (Rafailov 2023, eq. 7): of each pair, with l(y) the sum over an answer's tokens,

        h = beta · ((l(chosen) - ref(chosen)) - (l(rejected) - ref(rejected)))
        L = -(1 - e) · log sigmoid(h) - e · log sigmoid(-h)

    where e > 0 allows for a share e of wrong labels (Mitchell 2023, conservative DPO).

    Args:
        logp: of every target now; any shape.
        reference: the same of the reference model.
        answer: the answer of each target: 2 i is the chosen one of pair i, 2 i + 1 the rejected one; -1 for targets
            that do
        not count. int64, of that shape.
        pairs: their number.
        beta: the strength of the reference; above 0.
        label_smoothing: e; at least 0 and below one half.
    """
    if not beta > 0:
        raise ConfigError(f"beta = {beta} must be above 0: it holds the policy near the reference; try 0.1.")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing = {label_smoothing} must be at least 0 and below 0.5; 0 trusts every label."
        )
    logp_T, answer_T, lengths_N = _flat(logp, answer, 2 * pairs)
    gain_N = _sums(logp_T - reference.flatten().double().cpu(), answer_T, lengths_N)
    chosen_P, rejected_P = gain_N.view(pairs, 2).unbind(1)
    margin_P = beta * (chosen_P - rejected_P)
    keep, flip = 1 - label_smoothing, label_smoothing
    loss_P = -keep * torch.nn.functional.logsigmoid(margin_P) - flip * torch.nn.functional.logsigmoid(-margin_P)
    slope_P = -beta * (keep * (-margin_P).sigmoid() - flip * margin_P.sigmoid())
    slope_T = _each(torch.stack((slope_P, -slope_P), 1).flatten(), answer_T)
    measures = {
        "accuracy": float((margin_P > 0).double().mean()),
        "margin": float(margin_P.mean()),
        "chosen_reward": beta * float(chosen_P.mean()),
        "rejected_reward": beta * float(rejected_P.mean()),
    }
    return SequenceLossResult(weights=_weights(slope_T, logp), loss=float(loss_P.sum()), measures=measures)


def _flat(logp: Tensor, answer: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and answers of all targets in a row, and the number of targets of each answer."""
    answer_T = answer.flatten().cpu()
    lengths_N = torch.bincount(answer_T[answer_T >= 0], minlength=count).double()
    if len(lengths_N) != count or not bool((lengths_N > 0).all()):
        empty = (lengths_N == 0).nonzero().flatten().tolist() or [len(lengths_N) - 1]
        raise DataError(f"answer {empty[0]} of {count} must be there and have a token that counts; leave it out.")
    return logp.flatten().double().cpu(), answer_T, lengths_N


def _sums(values_T: Tensor, answer_T: Tensor, lengths_N: Tensor) -> Tensor:
    """The sum over each answer's tokens, in order; other tokens have no effect."""
    is_here_T = answer_T >= 0
    return torch.zeros_like(lengths_N).index_add_(0, answer_T[is_here_T], values_T[is_here_T])


def _each(values_N: Tensor, answer_T: Tensor) -> Tensor:
    """Each token's value of its answer, zero where there is none."""
    return values_N[answer_T.clamp(min=0)].where(answer_T >= 0, 0.0)


def _weights(slope_T: Tensor, like: Tensor) -> Tensor:
    return slope_T.neg().view(like.shape).to(like.device, torch.float32)
