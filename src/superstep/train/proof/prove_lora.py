"""prove --serve with adapters: a log-probability does not depend on the adapters of other requests.

Every text is computed three times in one batch: with one adapter, with another, and with none. Those with none must
have the bits of training; those with an adapter the bits that they have alone. Whether adapters add the right values is
tested elsewhere, against merged weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from superstep.model.files.peft_adapter import Adapter, LoraFactors, linears_of, write_adapter
from superstep.plan.model.shape import ModelShape
from superstep.serve.batch_generate import generate
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.request import Request, Sampling
from superstep.train.proof.prove_serving import TextLogprobs

ADAPTERS = ("one", "other")
RANKS = (8, 3)
"""Ranks of the two adapters: the second is no power of two."""

SCORED = Sampling(max_tokens=1, prompt_logprobs=True, ignore_eos=True, temperature=0.0)


@dataclass(frozen=True, slots=True)
class AdapterTexts:
    """Results of texts.

    Attributes:
        alone: with the first adapter, one text after the other.
        adapted: with it, in one batch with the others.
        plain: without an adapter, in the same steps.
    """

    alone: list[TextLogprobs]
    adapted: list[TextLogprobs]
    plain: list[TextLogprobs]


def write_adapters(root: Path, shape: ModelShape) -> None:
    """Write two adapters of random factors for every linear, of the size that training might reach."""
    for number, (name, rank) in enumerate(zip(ADAPTERS, RANKS, strict=True)):
        draw = torch.Generator().manual_seed(number)
        parts = {
            linear: LoraFactors(
                torch.randn(rank, inputs, generator=draw) * inputs**-0.5,
                torch.randn(outputs, rank, generator=draw) * 0.05,
                2.0 * rank,
            )
            for linear, (outputs, inputs) in linears_of(shape).items()
        }
        write_adapter(root / name, Adapter(parts=parts))


def beside_adapters(engine: InferenceEngine, texts: Sequence[Sequence[int]], root: Path) -> AdapterTexts:
    """The log-probabilities of texts.

    Args:
        engine: idle.
        texts: of one length.
        root: the folder of ``write_adapters``.
    """
    first, other = ADAPTERS
    for name in ADAPTERS:
        engine.adapters.load(name, root / name)
    answers = [generate(engine, [text[:-1]], SCORED, adapter=first)[0] for text in texts]
    alone = [(0, tuple(output.logprob for output in answer.prompt)) for answer in answers]
    for number, text in enumerate(texts):
        for place, adapter in enumerate((first, "", other)):
            engine.add(Request(id=3 * number + place, prompt=tuple(text[:-1]), sampling=SCORED, adapter=adapter))
    logprobs: list[tuple[float, ...]] = [()] * (3 * len(texts))
    while not engine.is_idle:
        for news in engine.step():
            logprobs[news.request] += tuple(output.logprob for output in news.prompt)
    return AdapterTexts(alone, [(0, output) for output in logprobs[0::3]], [(0, output) for output in logprobs[1::3]])


def losses_of(texts: Sequence[TextLogprobs]) -> Tensor:
    """Losses of whole texts in training's format: [B, S]."""
    return -torch.tensor([logprobs for _, logprobs in texts], dtype=torch.float32)
