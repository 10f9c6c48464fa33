"""Guesses of a small model of the same vocabulary, whose keys lie in pages of the same numbers as the large one's.

    step       large                      small
    prompt     p p p p p p                p p p p p p
    draw       d | e f g                  d -> e, e -> f, f -> g

So the prefix cache, taking pages back and giving them back hold for both. A page is known only when both have computed
all of its keys: before a step the small model computes the rows of known tokens of all chunks, then a row more for each
guess but the last; that one's key is computed with the next known token, or at once where it ends a page.

A guess is drawn as the token itself will be, with the same noise and in the same form. So the two agree often though
neither takes the likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from superstep.errors import ConfigError
from superstep.serve.compute.flat_batch import RequestRows, Rows
from superstep.serve.compute.sampler import LogitTotals, SamplingContext, columns, draw, read_rows
from superstep.serve.drafting.grammar_protocol import Matcher
from superstep.serve.drafting.speculate import DraftBudget
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.serve.scheduling.step import PositionRange


@dataclass(slots=True)
class _Run:
    """One request's guesses in the making.

    Attributes:
        live: the request.
        chunk: of the step.
        count: tokens to guess.
        form: of the answer, at the last guess; None where there is none, or where it says no more.
        guesses: so far.
    """

    live: LiveRequest
    chunk: PositionRange
    count: int
    form: Matcher | None
    guesses: list[int] = field(default_factory=list)

    def add(self, logits_V: Tensor, largest: float, likeliest: int) -> None:
        """Guess one token more."""
        token = self._draw(logits_V, largest, likeliest)
        self.guesses.append(token)
        if self.form is not None:
            self.form.advance(token)
            self.form = None if self.form.is_done else self.form

    def _draw(self, logits_V: Tensor, largest: float, likeliest: int) -> int:
        allowed = None
        if self.form is not None:
            try:
                allowed = self.form.allowed()
            except ConfigError:
                self.form = None
        if not math.isfinite(largest):
            self.form = None
            return 0  # it costs a row, as any bad guess
        context = SamplingContext(self.live.request.prompt, [*self.live.drawn, *self.guesses], allowed)
        sampling = replace(self.live.request.sampling, top_logprobs=0)
        totals = LogitTotals(largest, 0.0, likeliest)  # nobody asks for its log-probabilities
        return draw(logits_V, totals, sampling, context, self.live.known + len(self.guesses)).token


class DraftModel:
    """A ``Drafter``.

    Args:
        compute: gives the small model's logits of the wanted rows, on all ranks that share it.
        vocab: of both models.
        page_tokens: positions of a page.
    """

    def __init__(self, compute: Callable[[Rows], Tensor], *, vocab: int, page_tokens: int) -> None:
        self._compute = compute
        self._vocab = vocab
        self._page_tokens = page_tokens
        self._unfed: set[int] = set()
        self._behind: set[int] = set()

    def offer(self, live: LiveRequest, most: int, matcher: Matcher | None) -> int:
        """As many as may be."""
        return most

    def guess(self, budget: DraftBudget) -> Mapping[int, Sequence[int]]:
        """A step of this model for each guess, of all requests together."""
        runs = [
            _Run(budget.live[chunk.request], chunk, budget.counts.get(chunk.request, 0), _fork(budget, chunk.request))
            for chunk in budget.step.chunks
        ]
        self._go_on(runs, [self._feed(run) for run in runs])
        for place in range(1, max((run.count for run in runs), default=0) + 1):
            fed = [run for run in runs if run.count >= place and self._is_fed(run, place)]
            self._go_on(fed, [_Fed(run.live.known + place - 1, (run.guesses[-1],)) for run in fed])
        return {run.live.id: run.guesses for run in runs if run.count}

    def judged(self, request: int, guessed: int, stood: int) -> None:
        """Where all stood, the last one's key may not be there."""
        if request in self._unfed and guessed == stood:
            self._behind.add(request)

    def forget(self, request: int) -> None:
        """Its pages are others'."""
        self._behind.discard(request)
        self._unfed.discard(request)

    def _feed(self, run: _Run) -> _Fed:
        first = max(0, run.chunk.first - (run.live.id in self._behind))
        self._behind.discard(run.live.id)
        self._unfed.discard(run.live.id)
        return _Fed(first, tuple(run.live.tokens[first : min(run.chunk.end, run.live.known)]))

    def _is_fed(self, run: _Run, place: int) -> bool:
        """Whether a guess is computed now: another follows it, or a page ends with it."""
        if run.count > place or (run.live.known + place) % self._page_tokens == 0:
            return True
        self._unfed.add(run.live.id)
        return False

    def _go_on(self, runs: Sequence[_Run], fed: Sequence[_Fed]) -> None:
        """Compute some rows of each request, and guess what follows the last of them where guesses are missing."""
        tokens: list[int] = []
        wanted: list[int] = []
        for run, one in zip(runs, fed, strict=True):
            tokens += one.tokens
            if len(run.guesses) < run.count:
                wanted.append(len(tokens) - 1)
        if not tokens:
            return
        parts = tuple(
            RequestRows(first=one.first, count=len(one.tokens), pages=run.chunk.pages)
            for run, one in zip(runs, fed, strict=True)
        )
        logits_RV = self._compute(Rows(tokens=tuple(tokens), parts=parts, wanted=tuple(wanted)))[:, : self._vocab]
        guessing = [run for run in runs if len(run.guesses) < run.count]
        if guessing:
            (tops,) = read_rows(columns(*logits_RV.max(-1)))
            for run, logits_V, (largest, likeliest) in zip(guessing, logits_RV, tops, strict=True):
                run.add(logits_V, largest, int(likeliest))


@dataclass(frozen=True, slots=True)
class _Fed:
    """Neighbouring tokens of a request, from a position on."""

    first: int
    tokens: tuple[int, ...]


def _fork(budget: DraftBudget, request: int) -> Matcher | None:
    matcher = budget.matchers.get(request) if request in budget.counts else None
    return None if matcher is None else matcher.fork()
