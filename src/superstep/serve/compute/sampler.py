"""The sampler: a pure function of the logits, of earlier tokens, and of (seed, position).

A token is the argmax of logits / temperature plus Gumbel noise (Gumbel 1954; the trick of Maddison 2014), and the noise
of a token is a hash of seed, position and token. So the draw depends neither on other requests, nor on their order, nor
on the rank; and a draft token is accepted exactly where it equals the draw.

Statistics of many rows are computed on the logits' device and read together: the host waits once for a GPU.

    V  vocabulary      R  rows      D  rows that are drawn from      W  of these, those with a temperature that is not 1
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from superstep.numerics.sending import send
from superstep.serve.scheduling.request import Sampling, TokenOutput

_MIX_1, _MIX_2 = -0x00AE502812AA7333, -0x3B314601E57A13AD
"""The multipliers of MurmurHash3's finalizer, 0xFF51AFD7ED558CCD and 0xC4CEB9FE1A85EC53, as signed numbers."""

MOST_NOISE = 1 << 22
"""Noise values made at once: 32 MiB."""


class LogitTotals(NamedTuple):
    """Statistics of a row of logits.

    Attributes:
        largest: logit.
        log_total: the logarithm of the sum of exp(logit - largest).
        likeliest: the token of the largest logit, the first of equals.
    """

    largest: float
    log_total: float
    likeliest: int


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """Inputs of a draw besides the logits.

    Attributes:
        prompt: the tokens of the prompt.
        drawn: the answer's tokens so far.
        allowed: tokens that the grammar allows next, [V]; None means all.
    """

    prompt: Sequence[int]
    drawn: Sequence[int]
    allowed: Tensor | None = None


NO_CONTEXT = SamplingContext((), ())
"""For a draw that earlier tokens do not change, or that is done."""


class Draw(NamedTuple):
    """A draw of one token: the parameters, earlier tokens, and the token's position."""

    sampling: Sampling
    context: SamplingContext
    position: int

    @property
    def is_plain(self) -> bool:
        """Whether the model's logits are drawn from unchanged but for the temperature."""
        return self.sampling.is_plain and self.context.allowed is None


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Gumbel noise of some tokens at a position, fp64: the same on any machine.

    Args:
        seed: of the request's draws.
        position: of the drawn token.
        tokens: ids, int64.
    """
    return _noise(_key(seed, position), tokens)


def _key(seed: int, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest(), "little", signed=True)


def _noise(key: int | Tensor, tokens: Tensor) -> Tensor:
    bits = tokens * -0x61C8864680B583EB + key  # a step of the golden ratio; int64 wraps around
    for shift, factor in ((33, _MIX_1), (33, _MIX_2), (33, 1)):
        bits = (bits ^ (bits >> shift) & ((1 << (64 - shift)) - 1)) * factor
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


class SampledToken(NamedTuple):
    """A drawn token.

    Attributes:
        token: its id.
        finite: number of tokens that could be drawn.
        logit: the model's, of this token.
        logprob: after the temperature, rounded as the trainer's loss is; None at temperature 1.
    """

    token: int
    finite: int
    logit: float
    logprob: float | None = None


TotalsOf = Callable[[Tensor], Tensor]
"""``LogitTotals`` of each row, on the logits' device: [R, 3], fp64."""


def columns(*numbers_R: Tensor) -> Tensor:
    """Stack numbers of each row in fp64, which represents every fp32 and every id exactly."""
    return torch.stack([each.double() for each in numbers_R], -1)


def totals_of(logits_RV: Tensor) -> Tensor:
    """``TotalsOf`` in fast mode."""
    largest_R, likeliest_R = logits_RV.max(-1)
    log_total_R = (logits_RV - largest_R[:, None]).exp_().sum(-1).log_()
    return columns(largest_R, log_total_R, likeliest_R)


def read_rows(*parts: Tensor) -> list[list[list[float]]]:
    """Copy the rows of each part to the host in one transfer."""
    together = torch.cat([part.flatten() for part in parts]).cpu()
    pieces = together.split([part.numel() for part in parts])
    return [piece.view(part.shape).tolist() for piece, part in zip(pieces, parts, strict=True)]


def read_totals(rows: Sequence[Sequence[float]]) -> list[LogitTotals]:
    return [LogitTotals(largest, log_total, int(likeliest)) for largest, log_total, likeliest in rows]


class SampledTokens(NamedTuple):
    """Draws of many rows, on the logits' device.

    Attributes:
        tokens: for each row the token, the number of possible tokens, its logit, and that after the temperature: [D,
            4], fp64.
        totals: after the temperature, of the rows where that is not 1: [W, 3], fp64.
    """

    tokens: Tensor
    totals: Tensor


def draw_rows(
    logits_DV: Tensor, samplings: Sequence[tuple[Sampling, int]], totals: TotalsOf = totals_of
) -> SampledTokens:
    """Draw from many rows that need no change but a temperature above zero; each row as if it were alone.

    Args:
        logits_DV: fp32.
        samplings: for each row, its sampling parameters and the position of the token.
        totals: of rows after the temperature; in exact mode those with the bits of training.
    """
    rows = max(1, MOST_NOISE // logits_DV.shape[1])
    pieces = [
        _draw_piece(logits_DV[first : first + rows], samplings[first : first + rows], totals)
        for first in range(0, len(samplings), rows)
    ]
    return pieces[0] if len(pieces) == 1 else SampledTokens(*map(torch.cat, zip(*pieces, strict=True)))


def _draw_piece(logits_DV: Tensor, samplings: Sequence[tuple[Sampling, int]], totals: TotalsOf) -> SampledTokens:
    device = logits_DV.device
    scores_DV = logits_DV / send(torch.tensor([[how.temperature] for how, _ in samplings]), device)
    keys_D1 = send(torch.tensor([[_key(how.seed, position)] for how, position in samplings]), device)
    noise_DV = _noise(keys_D1, torch.arange(logits_DV.shape[1], device=device))
    tokens_D1 = (scores_DV.double() + noise_DV).argmax(-1, keepdim=True)
    own_D, score_D = (each.gather(1, tokens_D1).flatten() for each in (logits_DV, scores_DV))
    tokens = columns(tokens_D1.flatten(), scores_DV.isfinite().sum(-1), own_D, score_D)
    warm = [row for row, (how, _) in enumerate(samplings) if how.temperature != 1.0]
    if not warm:
        return SampledTokens(tokens, tokens.new_empty(0, len(LogitTotals._fields)))
    return SampledTokens(tokens, totals(scores_DV[send(torch.tensor(warm), device)]))


def read_draws(
    parts: Sequence[Sequence[Sequence[float]]], samplings: Sequence[tuple[Sampling, int]]
) -> list[SampledToken]:
    """Decode the draws.

    Args:
        parts: of ``SampledTokens``, as ``read_rows`` returns them.
        samplings: those of ``draw_rows``.
    """
    tokens, totals = parts
    warm = iter(read_totals(totals))
    return [
        SampledToken(
            int(token), int(finite), logit, None if how.temperature == 1.0 else round_logprob(score, next(warm))
        )
        for (token, finite, logit, score), (how, _) in zip(tokens, samplings, strict=True)
    ]


def draw_plain(
    logits_DV: Tensor, samplings: Sequence[tuple[Sampling, int]], totals: TotalsOf = totals_of
) -> list[SampledToken]:
    """``draw_rows``, and copy the result to the host."""
    return read_draws(read_rows(*draw_rows(logits_DV, samplings, totals)), samplings)


def draw(
    logits_V: Tensor,
    totals: LogitTotals,
    one: Draw,
    *,
    top: Sequence[Sequence[float]] | None = None,
    version: str = "",
) -> TokenOutput:
    """Draw one token, with its log-probabilities.

    Args:
        logits_V: the model's, fp32.
        totals: of the model's own distribution.
        one: the draw.
        top: the row's likeliest tokens, if they were read with those of other rows.
        version: of the weights.
    """
    if not one.is_plain:
        drawn, top = read_changed(*read_rows(*draw_changed(logits_V, one)))
    elif one.sampling.is_greedy:
        drawn = SampledToken(totals.likeliest, 1, totals.largest, 0.0)
    else:
        drawn = draw_plain(logits_V[None], [(one.sampling, one.position)])[0]
    if top is None:
        top = read_rows(likeliest(logits_V, one.sampling.top_logprobs))[0] if one.sampling.top_logprobs else []
    return describe(drawn, top, totals, vocab=len(logits_V), version=version)


def draw_changed(logits_V: Tensor, one: Draw) -> tuple[Tensor, Tensor]:
    """A draw from logits that are changed or cut, on their device.

    Returns:
        The fields of ``SampledToken``, [1, 4], fp64, and the likeliest tokens.
    """
    return _draw_changed(logits_V, one), likeliest(logits_V, one.sampling.top_logprobs)


def read_changed(
    tokens: Sequence[Sequence[float]], top: Sequence[Sequence[float]]
) -> tuple[SampledToken, Sequence[Sequence[float]]]:
    """Decode a draw of ``draw_changed``, as ``read_rows`` returns it."""
    ((token, finite, logit, after),) = tokens
    return SampledToken(int(token), int(finite), logit, after), top


def draw_tokens(logits_RV: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """Draw a token from each row, and read them together; None where the largest logit is not finite."""
    plain = [row for row, one in enumerate(draws) if one.is_plain and not one.sampling.is_greedy]
    changed = [row for row, one in enumerate(draws) if not one.is_plain]
    parts = [columns(*logits_RV.max(-1)), *(_draw_changed(logits_RV[row], draws[row]) for row in changed)]
    if plain:
        ways = [(draws[row].sampling, draws[row].position) for row in plain]
        parts.append(draw_rows(logits_RV[send(torch.tensor(plain), logits_RV.device)], ways).tokens)
    likeliest_R, *read = read_rows(*parts)
    tokens = [token for _, token in likeliest_R]
    for row, (token, *_) in zip((*changed, *plain), (fields for part in read for fields in part), strict=True):
        tokens[row] = token
    return [
        int(token) if math.isfinite(largest) else None for token, (largest, _) in zip(tokens, likeliest_R, strict=True)
    ]


def describe(
    drawn: SampledToken, top: Sequence[Sequence[float]], totals: LogitTotals, *, vocab: int, version: str
) -> TokenOutput:
    """A drawn token and the likeliest ones, with log-probabilities.

    Args:
        drawn: the token.
        top: the likeliest tokens, as ``read_rows`` returns them.
        totals: of the model's own distribution.
        vocab: tokens of the model.
        version: of the weights.
    """
    own = round_logprob(drawn.logit, totals)
    return TokenOutput(
        token=drawn.token,
        logprob=own,
        drawn_logprob=own if drawn.logprob is None else drawn.logprob,
        kept=0 if drawn.finite == vocab else drawn.finite,
        top=read_likeliest(top, totals) if top else (),
        version=version,
    )


def _draw_changed(logits_V: Tensor, one: Draw) -> Tensor:
    sampling, context, position = one
    scores_V = change_logits(logits_V, sampling, context)
    if sampling.is_greedy:
        token_1 = scores_V.argmax(-1, keepdim=True)
        return columns(token_1, torch.ones_like(token_1), logits_V.gather(0, token_1), torch.zeros_like(token_1))
    tokens_K, scores_K = truncate(scores_V / sampling.temperature, sampling)
    at_1 = (scores_K.double() + gumbel(sampling.seed, position, tokens_K)).argmax(-1, keepdim=True)
    token_1 = tokens_K.gather(0, at_1)
    logprob_1 = scores_K.gather(0, at_1).double() - scores_K.double().logsumexp(0)
    finite_1 = scores_K.isfinite().sum(0, keepdim=True)
    return columns(token_1, finite_1, logits_V.gather(0, token_1), logprob_1)


def round_logprob(logit: float, totals: LogitTotals) -> float:
    """The log-probability of a token of this logit, rounded as the trainer's loss is."""
    return -float(np.float32(totals.log_total) + np.float32(totals.largest) - np.float32(logit))


def likeliest(logits_V: Tensor, count: int) -> Tensor:
    """The ``count`` largest logits and their tokens: [count, 2], fp64."""
    return columns(*logits_V.topk(min(count, len(logits_V))))


def read_likeliest(rows: Sequence[Sequence[float]], totals: LogitTotals) -> tuple[tuple[int, float], ...]:
    """The tokens of ``likeliest``, as they were read, and their log-probabilities."""
    return tuple((int(token), round_logprob(logit, totals)) for logit, token in rows)


def change_logits(logits_V: Tensor, sampling: Sampling, context: SamplingContext) -> Tensor:
    """The logits after penalties and biases, and without what the answer's form does not allow; a tensor of its own."""
    scores_V = logits_V.clone()
    used = {*context.prompt, *context.drawn} if sampling.repetition_penalty != 1.0 else set()
    counts = Counter(context.drawn if sampling.presence_penalty or sampling.frequency_penalty else ())
    biases = defaultdict[int, float](float)
    for token, bias in sampling.logit_bias:
        biases[token] += bias
    if tokens := sorted({*used, *counts, *biases}):
        changes = [[token, token in used, counts[token], biases[token]] for token in tokens]
        sent_C4 = send(torch.tensor(changes, dtype=torch.float64), scores_V.device)
        token_C, has_occurred_C, times_C, bias_C = sent_C4.unbind(-1)
        at_C, by = token_C.long(), sampling.repetition_penalty
        old_C = scores_V[at_C]
        old_C = torch.where(has_occurred_C > 0, torch.where(old_C > 0, old_C / by, old_C * by), old_C)
        penalty_C = sampling.presence_penalty + sampling.frequency_penalty * times_C.float()
        scores_V[at_C] = old_C - torch.where(times_C > 0, penalty_C, 0.0) + bias_C.float()
    if context.allowed is not None:
        scores_V.masked_fill_(send(~context.allowed, scores_V.device), float("-inf"))
    return scores_V


def truncate(scores_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens by id, and their scores, -inf where they may not be drawn: top-k first, of those top-p, of those min-p."""
    if sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return torch.arange(len(scores_V), device=scores_V.device), scores_V
    count = min(sampling.top_k or len(scores_V), len(scores_V))
    scores_K, tokens_K = scores_V.topk(count) if count < len(scores_V) else scores_V.sort(descending=True, stable=True)
    share_K = scores_K.double().softmax(0)
    before_K = share_K.cumsum(0) - share_K
    stays_K = (before_K < sampling.top_p) & (share_K >= sampling.min_p * share_K[0])
    stays_K[:1] = True
    return tokens_K, scores_K.masked_fill(~stays_K, float("-inf"))
