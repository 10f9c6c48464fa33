"""Draft tokens from a small model with the same vocabulary; its keys lie in pages with the large model's numbers.

    step       large                      small
    prompt     p p p p p p                p p p p p p
    draw       d | e f g                  d -> e, e -> f, f -> g

So the prefix cache, allocation and release of pages hold for both models. A page counts as cached only when both models
have computed all of its keys. Before a step the small model computes the known tokens of all chunks, then one more row
for each draft token but the last. The last one's key is computed with the next known token, or at once where it ends a
page.

A draft token is drawn with the noise and the grammar of the token itself. So both models often agree even where neither
takes the likeliest token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from superstep.errors import ConfigError
from superstep.serve.compute.flat_batch import RequestRows, Rows
from superstep.serve.compute.sampler import Draw, SamplingContext, draw_tokens
from superstep.serve.drafting.grammar_protocol import Matcher
from superstep.serve.drafting.speculate import DraftBudget
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.serve.scheduling.step import PositionRange


@dataclass(slots=True)
class _Run:
    """Draft tokens of one request during a step.

    Attributes:
        live: the request.
        chunk: of the step.
        count: tokens to draft.
        form: the answer's grammar at the last draft token; None without one, or after its end.
        guesses: draft tokens so far.
    """

    live: LiveRequest
    chunk: PositionRange
    count: int
    form: Matcher | None
    guesses: list[int] = field(default_factory=list)

    def next_draw(self) -> Draw:
        """The draw of one more draft token."""
        allowed = None
        if self.form is not None:
            try:
                allowed = self.form.compute_mask()
            except ConfigError:
                self.form = None
        context = SamplingContext(self.live.request.prompt, [*self.live.drawn, *self.guesses], allowed)
        sampling = replace(self.live.request.sampling, top_logprobs=0)
        return Draw(sampling, context, self.live.known + len(self.guesses))

    def add(self, token: int | None) -> None:
        """Add a drawn token; None if the logits were not finite."""
        if token is None:
            self.form, token = None, 0  # costs a row, as any rejected draft token
        self.guesses.append(token)
        if self.form is not None:
            self.form.advance(token)
            self.form = None if self.form.is_done else self.form


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
        """All that are allowed."""
        return most

    def guess(self, budget: DraftBudget) -> Mapping[int, Sequence[int]]:
        """Run the small model once for each draft position, for all requests together."""
        runs = [
            _Run(budget.live[chunk.request], chunk, budget.counts.get(chunk.request, 0), _fork(budget, chunk.request))
            for chunk in budget.step.chunks
        ]
        self._go_on(runs, [self._feed(run) for run in runs])
        for place in range(1, max((run.count for run in runs), default=0) + 1):
            fed = [run for run in runs if run.count >= place and self._is_fed(run, place)]
            self._go_on(fed, [_Fed(run.live.known + place - 1, (run.guesses[-1],)) for run in fed])
        return {run.live.id: run.guesses for run in runs if run.count}

    def judge(self, request: int, guessed: int, stood: int) -> None:
        """Note the requests of which all draft tokens were accepted: the last one's key may be missing."""
        if request in self._unfed and guessed == stood:
            self._behind.add(request)

    def forget(self, request: int) -> None:
        """Drop a request: its pages belong to others now."""
        self._behind.discard(request)
        self._unfed.discard(request)

    def _feed(self, run: _Run) -> _Fed:
        first = max(0, run.chunk.first - (run.live.id in self._behind))
        self._behind.discard(run.live.id)
        self._unfed.discard(run.live.id)
        return _Fed(first, tuple(run.live.tokens[first : min(run.chunk.end, run.live.known)]))

    def _is_fed(self, run: _Run, place: int) -> bool:
        """Whether this draft token is computed now: another one follows, or it ends a page."""
        if run.count > place or (run.live.known + place) % self._page_tokens == 0:
            return True
        self._unfed.add(run.live.id)
        return False

    def _go_on(self, runs: Sequence[_Run], fed: Sequence[_Fed]) -> None:
        """Compute rows of each request, and draw the next draft token where some are missing."""
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
            draws = [run.next_draw() for run in guessing]
            for run, token in zip(guessing, draw_tokens(logits_RV, draws), strict=True):
                run.add(token)


@dataclass(frozen=True, slots=True)
class _Fed:
    """Consecutive tokens of a request, from position ``first``."""

    first: int
    tokens: tuple[int, ...]


def _fork(budget: DraftBudget, request: int) -> Matcher | None:
    matcher = budget.matchers.get(request) if request in budget.counts else None
    return None if matcher is None else matcher.fork()
