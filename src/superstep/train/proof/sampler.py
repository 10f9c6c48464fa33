"""prove: the sampler against plain code: the allowed tokens, the drawn one, and its log-probabilities.

A draw is compared with a few lines of plain Python on random logits. Then a server of the proof's checkpoint draws
tokens, and their log-probabilities are compared with a decoder of plain torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import load_weights
from superstep.model.unit import global_tensors
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_engine
from superstep.serve.compute.sampler import NO_CONTEXT, Draw, draw, read_rows, read_totals, totals_of
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import Sampling

SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.7),
    Sampling(seed=3, top_k=5),
    Sampling(seed=4, top_p=0.9, temperature=1.5),
    Sampling(seed=5, min_p=0.05),
    Sampling(seed=6, top_k=40, top_p=0.8, min_p=0.01, temperature=0.9),
)
ROWS, VOCAB = 16, 101
"""Of random logits."""

NEAR = 1e-4
"""Allowed difference of fp32 log-probabilities in nats; they are rounded to 1e-6, and the model's sums to 1e-5."""

NEAR_BF16 = 0.1
"""The same of a model in bf16: its logits of size 4 have a spacing of 0.03."""

PROMPTS, TOKENS = 4, 8
"""Answers of the served checkpoint, and tokens of each."""


class PlainDraw(NamedTuple):
    """The expected draw.

    Attributes:
        token: its id.
        kept: number of tokens that could be drawn.
        logprob: of the model's distribution.
        drawn_logprob: of the one that was drawn from.
    """

    token: int
    kept: int
    logprob: float
    drawn_logprob: float


def plain_draw(logits: Sequence[float], how: Sampling, position: int) -> PlainDraw:
    """A draw as documented: first top-k, then top-p, then min-p, then the largest sum of score and Gumbel noise, which
    is a hash of seed, position and token.
    """
    logprobs = _log_softmax(dict(enumerate(logits)))
    if how.temperature == 0.0:
        token = max(range(len(logits)), key=lambda v: logits[v])
        return PlainDraw(token, 1, logprobs[token], 0.0)
    scores = {v: logit / how.temperature for v, logit in enumerate(logits)}
    order = sorted(scores, key=lambda v: -scores[v])[: how.top_k or None]
    share = {v: math.exp(logp) for v, logp in _log_softmax({v: scores[v] for v in order}).items()}
    kept, before = [], 0.0
    for v in order:
        if before < how.top_p and share[v] >= how.min_p * share[order[0]]:
            kept.append(v)
        before += share[v]
    noisy = {v: scores[v] + _gumbel(how.seed, position, v) for v in kept}
    token = max(noisy, key=lambda v: noisy[v])
    return PlainDraw(token, len(kept), logprobs[token], _log_softmax({v: scores[v] for v in kept})[token])


def _log_softmax(scores: dict[int, float]) -> dict[int, float]:
    largest = max(scores.values())
    total = largest + math.log(sum(math.exp(score - largest) for score in scores.values()))
    return {v: score - total for v, score in scores.items()}


def _gumbel(seed: int, position: int, token: int) -> float:
    """Minus log of minus log of a number in (0, 1): MurmurHash3's finalizer of a key and a token."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest(), "little")
    word = (token * 0x9E3779B97F4A7C15 + key) % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        word = ((word ^ (word >> 33)) * factor) % 2**64
    return -math.log(-math.log(((word >> 11) + 0.5) / 2**53))


def draw_fault() -> str:
    """A difference between draws and plain code, in words; empty without one."""
    logits_RV = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    for how in SAMPLINGS:
        (rows,) = read_rows(totals_of(logits_RV))
        for position, (logits_V, totals) in enumerate(zip(logits_RV, read_totals(rows), strict=True)):
            drawn = draw(logits_V, totals, Draw(how, NO_CONTEXT, position))
            wanted = plain_draw(logits_V.tolist(), how, position)
            comparisons = (
                ("token", drawn.token, wanted.token, 0.0),
                ("number of tokens to draw from", drawn.kept or VOCAB, wanted.kept, 0.0),
                ("log-probability", drawn.logprob, wanted.logprob, NEAR),
                ("log-probability after temperature and cuts", drawn.drawn_logprob, wanted.drawn_logprob, NEAR),
            )
            for name, ours, plain, allowed in comparisons:
                if not abs(ours - plain) <= allowed:
                    settings = f"temperature {how.temperature}, top_k {how.top_k}, top_p {how.top_p}, min_p {how.min_p}"
                    return f"the sampler, with {settings}: the {name} is {ours:g}, not {plain:g}"
    return ""


def can_serve(run: Resolved) -> bool:
    """Whether a checkpoint of the run can be compared with a plain decoder, row by row."""
    shape = run.decoder
    return shape is not None and shape.moe is None and shape.delta is None and run.config.lora is None


def find_served_fault(run: Resolved, checkpoint: Path, texts: Sequence[Sequence[int]]) -> str:
    """A difference between a server of a checkpoint and a plain decoder, in words; empty without one.

    Args:
        run: for which ``can_serve`` is true.
        checkpoint: of its weights.
        texts: tokens to begin with.
    """
    compute = run.config.numerics.compute
    serve = ServeConfig(context_tokens=run.config.data.sequence_tokens, requests=PROMPTS, compute=compute)
    engine = open_engine(checkpoint, serve)
    prompts = [list(text[: max(1, len(text) - TOKENS)]) for text in texts[:PROMPTS]]
    samplings = [Sampling(seed=n, max_tokens=TOKENS, ignore_eos=True) for n in range(len(prompts))]
    answers = generate(engine, prompts, samplings)
    engine.end()
    shape = replace(run.shape, mtp_weight=None)
    decoder = Decoder(shape).eval()
    load_weights(checkpoint, global_tensors(decoder, units(shape)))
    allowed = NEAR if compute == "fp32" else NEAR_BF16
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logprobs_SV = decoder(torch.tensor([prompt + answer.ids]))[0].log_softmax(-1)
        for place, output in enumerate(answer.tokens, len(prompt)):
            plain = float(logprobs_SV[place - 1, output.token])
            if not abs(output.logprob - plain) <= allowed:
                return (
                    f"the sampler of the saved checkpoint: token {place} (id {output.token}) has log-probability "
                    f"{output.logprob:g}, and {plain:g} by a plain decoder; {allowed:g} is allowed"
                )
    return ""
