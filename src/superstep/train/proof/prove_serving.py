"""prove --serve: a server's log-probability of every token equals training's, bit for bit.

The engine answers prompts, with the log-probability of each token. The trainer, on its own layout in exact mode,
computes the loss of each token of the same texts. Then the engine computes these tokens on every other path that a
server may take: for example alone, in chunks, from cached pages, after preemption, with accepted draft tokens and with
rejected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers, gather
from superstep.data.batch import TOKENS, Batch
from superstep.engine.engine import Engine as Trainer
from superstep.engine.values.microbatch import microbatches, microbatches_of, rows
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.batch_generate import PromptResult, generate
from superstep.serve.config import NGRAM, ServeConfig
from superstep.serve.drafting.speculate import DraftBudget
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.request import Sampling
from superstep.serve.scheduling.request import TokenOutput as Token
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.state.checkpoint import load
from superstep.train.weights.model import units_of


def losses_in_training(world: World, run: Resolved, checkpoint: Path, batches: Sequence[Batch]) -> list[Tensor]:
    """The loss of every token of each batch, on the run's own layout, with a checkpoint's weights: fp32 [B, S], whole
    on every rank. Ignored targets have 0.
    """
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=300))
    try:
        engine = Trainer(run, units_of(run), mesh)
        position = load(checkpoint, engine.pieces(), RankPeers(world.rank, world.size))
        engine.note_loaded(position.step)
        by_batch = []
        for batch in batches:
            mine = batch.rows(rows(run.plan, mesh))
            losses = [-logprobs for logprobs in engine.own_logprobs(microbatches_of(mine, run.plan, mesh))]
            # The index of each token in the batch, cut as the tokens are.
            places = torch.arange(batch.tokens_BS.numel()).view_as(batch.tokens_BS)[rows(run.plan, mesh)]
            held = [part.input for part in microbatches(places, places, run.plan, mesh)]
            by_batch.append(_whole(batch, [(p.cpu(), x.cpu()) for p, x in zip(held, losses, strict=False)]))
    finally:
        mesh.destroy()
    return by_batch


def batch_of(texts: Sequence[Sequence[int]]) -> Batch:
    """Texts of one length as a batch of the trainer's. The target of the last position is not part of the text."""
    tokens_BS = torch.tensor([list(text) for text in texts])
    return Batch({TOKENS: tokens_BS}, tokens_BS.roll(-1, 1), tokens_BS.numel(), None)


def _whole(batch: Batch, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A batch's losses from those of all ranks; values that several ranks computed must be equal."""
    whole = torch.full((batch.tokens_BS.numel(),), float("nan"))
    mine = [(places.flatten().tolist(), losses.flatten().tolist()) for places, losses in parts]
    for theirs in gather(mine, list[tuple[list[int], list[float]]]):
        for at, numbers in theirs:
            losses = torch.tensor(numbers)
            before = whole[at]
            assert bool((before.isnan() | (before == losses)).all()), "ranks that share a token disagree"
            whole[at] = losses
    assert not whole.isnan().any(), "some tokens have no loss"
    return whole.view_as(batch.tokens_BS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPath:
    """A path by which a server computes a token.

    Attributes:
        name: of the path.
        step_tokens: a small number of rows of a step; None uses the default.
        pages: a small KV cache; None uses the default.
        texts: number of texts, where each takes many steps; None means all.
        is_alone: one prompt after the other, not all together.
        is_twice: a second time, from cached pages.
        is_restarted: half of each answer by one engine, the rest by another.
        guesses: from the text, as ``superstep serve`` does, or known tokens with some of them changed.
        as_prompt: the whole text is a prompt with log-probabilities; nothing is drawn.
    """

    name: str
    step_tokens: int | None = None
    pages: int | None = None
    texts: int | None = None
    is_alone: bool = False
    is_twice: bool = False
    is_restarted: bool = False
    guesses: Literal["from text", "known"] | None = None
    as_prompt: bool = False

    @property
    def engines(self) -> int:
        """Number of engines, one after the other."""
        return 2 if self.is_restarted else 1

    def of(self, serve: ServeConfig) -> ServeConfig:
        """The settings of its engine."""
        return replace(
            serve,
            step_tokens=self.step_tokens or serve.step_tokens,
            pages=self.pages,
            speculate=NGRAM if self.guesses else "",
        )


FEW = 16
"""Texts of a path that takes many steps for each."""


def ways(tokens: int) -> tuple[ServingPath, ...]:
    """All paths, for texts of ``tokens`` tokens."""
    page_tokens = ServeConfig().page_tokens
    whole = -(-tokens // page_tokens)
    return (
        ServingPath(name="one at a time", is_alone=True, texts=FEW),
        ServingPath(name="all together"),
        ServingPath(name="in chunks of 7 tokens", step_tokens=7, texts=FEW),
        ServingPath(name="from cached pages", is_twice=True),
        ServingPath(name="with pages for two texts", pages=2 * whole, texts=FEW),
        ServingPath(name="after a restart half-way", is_restarted=True),
        ServingPath(name="speculated", guesses="from text"),
        ServingPath(name="speculated, guesses right and wrong", guesses="known"),
        ServingPath(
            name="speculated, in few rows and pages", guesses="known", step_tokens=13, pages=2 * whole, texts=FEW
        ),
        ServingPath(name="as prompts", as_prompt=True),
        ServingPath(name="as prompts in chunks of 13 tokens", step_tokens=13, as_prompt=True, texts=2 * FEW),
    )


def logprobs_of(ways: Sequence[ServingPath], prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Number of log-probabilities of some paths, for texts of ``tokens`` tokens with these prompts."""
    return sum(tokens - (1 if way.as_prompt else len(p)) for way in ways for p in prompts[: way.texts])


class KnownTexts:
    """Drafts the texts themselves, with every third token changed: so some are accepted, and many are not.

    Args:
        texts: by the number of their request.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts

    def offer(self, live: LiveRequest, most: int, matcher: object) -> int:
        """All that are allowed."""
        return most

    def guess(self, budget: DraftBudget) -> Mapping[int, Sequence[int]]:
        """The next tokens, with some of them changed."""
        drafts = {}
        for request, count in budget.counts.items():
            known = budget.live[request].known
            drafts[request] = [
                token if place % 3 else max(1, token) - 1
                for place, token in enumerate(self._texts[request][known : known + count], known)
            ]
        return drafts

    def judge(self, request: int, guessed: int, stood: int) -> None:
        """Nothing to learn."""

    def forget(self, request: int) -> None:
        """Nothing to drop."""


TextLogprobs = tuple[int, tuple[float, ...]]
"""The first position with a log-probability of the next token, and these."""

Open = Callable[[], InferenceEngine]
"""Opens an engine for a path, after the one before has ended."""


def answers(
    engine: InferenceEngine, way: ServingPath, prompts: Sequence[Sequence[int]], tokens: int
) -> list[PromptResult]:
    """Answers on a path; prompt and answer together have ``tokens`` tokens.

    Args:
        engine: idle, opened for the path.
        way: the path.
        prompts: shorter than that.
        tokens: of a text.
    """
    samplings = [_sampling(number, tokens - len(prompt)) for number, prompt in enumerate(prompts)]
    if way.is_twice:
        generate(engine, prompts, samplings)
    if way.is_alone:
        return [generate(engine, [prompt], [how])[0] for prompt, how in zip(prompts, samplings, strict=True)]
    return generate(engine, prompts, samplings)


def _sampling(number: int, tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, seed=number, ignore_eos=True)


def serve_logprobs(
    opened: Open, way: ServingPath, texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
) -> list[TextLogprobs]:
    """The log-probabilities of texts from ``answers``, computed on this path. Empty for a text with other
    drawn tokens.
    """
    texts, prompts = texts[: way.texts], prompts[: way.texts]
    engine = opened()
    if way.as_prompt:
        sampling = Sampling(max_tokens=1, prompt_logprobs=True, ignore_eos=True, temperature=0.0)
        generated = generate(engine, [text[:-1] for text in texts], sampling)
        return [(0, tuple(output.logprob for output in answer.prompt)) for answer in generated]
    if way.is_restarted:
        again = _restart(engine, opened, prompts, len(texts[0]))
    else:
        again = [answer.tokens for answer in answers(engine, way, prompts, len(texts[0]))]
    return [
        (len(prompt) - 1, tuple(one.logprob for one in output) if ids_of(output) == list(text[len(prompt) :]) else ())
        for prompt, text, output in zip(prompts, texts, again, strict=True)
    ]


def ids_of(outputs: Sequence[Token]) -> list[int]:
    return [one.token for one in outputs]


def _restart(
    engine: InferenceEngine, opened: Open, prompts: Sequence[Sequence[int]], tokens: int
) -> list[tuple[Token, ...]]:
    """Half of each answer, and the rest by another engine, with the first half as a part of the prompt."""
    halves = [max(1, (tokens - len(prompt)) // 2) for prompt in prompts]
    first = generate(engine, prompts, [_sampling(number, half) for number, half in enumerate(halves)])
    begun = [[*prompt, *half.ids] for prompt, half in zip(prompts, first, strict=True)]
    engine.end()
    other = opened()
    numbers = [number for number, text in enumerate(begun) if len(text) < tokens]
    rest = generate(other, [begun[n] for n in numbers], [_sampling(n, tokens - len(begun[n])) for n in numbers])
    answered = [answer.tokens for answer in first]
    for number, answer in zip(numbers, rest, strict=True):
        answered[number] += answer.tokens
    return answered


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingComparison:
    """One path of serving, compared with training.

    Attributes:
        way: its name.
        compared: log-probabilities.
        differing: those with other bits; all of a text with other tokens.
        largest: the largest difference.
        first: text and position of the first difference; None without one.
    """

    way: str
    compared: int
    differing: int
    largest: float
    first: tuple[int, int] | None


def compare(way: str, trained: Tensor, served: Sequence[TextLogprobs]) -> ServingComparison:
    """Compare the log-probabilities of a path with the losses of training, [B, S]."""
    compared = differing = 0
    largest, first = 0.0, None
    for row, (start, logprobs) in enumerate(served):
        ours = trained[row, start : start + len(logprobs)] if logprobs else trained[row, start:]
        theirs = -torch.tensor(logprobs, dtype=torch.float32) if logprobs else torch.full_like(ours, float("nan"))
        wrong = ours != theirs
        compared += len(ours)
        differing += int(wrong.sum())
        if wrong.any():
            largest = max(largest, float((ours - theirs).abs().nan_to_num(float("inf")).max()))
            first = first or (row, start + int(wrong.nonzero()[0]))
    return ServingComparison(way=way, compared=compared, differing=differing, largest=largest, first=first)
