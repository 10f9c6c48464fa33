"""Speculative decoding: draft tokens after a request's known tokens, verified in one step.

    known        a b c d             d was drawn last, its key is not in the cache yet
    draft                e f g
    rows               d e f g       one chunk; the logits of all four are wanted
    drawn              e f x         e and f are accepted, x replaces g: three tokens of one step

A draw is a function of the logits, the request's seed and the position, so a draft token is accepted where it equals
the draw (Leviathan 2023 accepts by chance, and so draws other tokens than without drafts). The drawn tokens depend
neither on the drafter, nor on whether there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from superstep.serve.drafting.grammar_protocol import Matcher
from superstep.serve.drafting.ngram_drafter import PairLookup
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.serve.scheduling.step import ScheduledStep

MOST_MISSES = 6
"""A request with poor drafts pauses for 2 to this power of tokens at most."""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """A step's room for draft tokens.

    Attributes:
        step: the whole step.
        live: every request by its number.
        matchers: of requests with a grammar.
        counts: draft tokens of each request that has room for some.
    """

    step: ScheduledStep
    live: Mapping[int, LiveRequest]
    matchers: Mapping[int, Matcher]
    counts: Mapping[int, int]


class Drafter(Protocol):
    """Makes draft tokens."""

    def offer(self, live: LiveRequest, most: int, matcher: Matcher | None) -> int:
        """How many tokens it would draft for a request, before the step is scheduled."""

    def guess(self, budget: DraftBudget) -> Mapping[int, Sequence[int]]:
        """Exactly as many tokens as ``budget.counts`` says. Called for every step, before it is computed."""

    def judge(self, request: int, guessed: int, stood: int) -> None:
        """Report how many of a request's draft tokens were accepted."""

    def forget(self, request: int) -> None:
        """Drop a request that ended or was preempted."""


class NgramDrafter:
    """Draft tokens from the request's own text."""

    def __init__(self) -> None:
        self._lookups: dict[int, PairLookup] = {}
        self._drafts: dict[int, tuple[int, ...]] = {}

    def offer(self, live: LiveRequest, most: int, matcher: Matcher | None) -> int:
        """The number of matched tokens, up to the first that the grammar does not allow."""
        draft = self._lookups.setdefault(live.id, PairLookup()).guess(live.tokens, most)
        if matcher is not None and draft:
            draft = draft[: matcher.legal(draft)]
        self._drafts[live.id] = draft
        return len(draft)

    def guess(self, budget: DraftBudget) -> Mapping[int, Sequence[int]]:
        """The matched tokens, cut to the budget."""
        return {request: self._drafts[request][:count] for request, count in budget.counts.items()}

    def judge(self, request: int, guessed: int, stood: int) -> None:
        """Nothing to learn: the text stays the same."""

    def forget(self, request: int) -> None:
        """Drop the table; a request that goes on is indexed again from its start."""
        self._lookups.pop(request, None)
        self._drafts.pop(request, None)


class DraftPace:
    """Pause of drafting: a request with poor drafts pauses for some tokens, longer each time.

    A rejected draft counts one, and each accepted token subtracts one. At a count of n the request pauses until 2^n
    more tokens are known. So the pause depends on the request's own tokens alone.
    """

    def __init__(self) -> None:
        self._misses = 0
        self._until = 0

    def is_resting(self, known: int) -> bool:
        """Whether a request with ``known`` tokens pauses."""
        return known < self._until

    def judge(self, known: int, stood: int) -> None:
        """Note that ``stood`` draft tokens of a step were accepted, at ``known`` tokens."""
        self._misses = max(0, self._misses - stood) if stood else min(MOST_MISSES, self._misses + 1)
        self._until = 0 if stood else known + 2**self._misses


class Speculation:
    """The engine's speculative decoding.

    Args:
        guesser: the drafter; None without speculative decoding.
        tokens: the most draft tokens of one request in a step.
    """

    def __init__(self, guesser: Drafter | None = None, tokens: int = 0) -> None:
        self._guesser = guesser
        self._tokens = tokens
        self._paces: dict[int, DraftPace] = {}
        self.drafts = self.drafted_tokens = self.accepted_tokens = 0

    def offer(self, running: Iterable[LiveRequest], matchers: Mapping[int, Matcher]) -> None:
        """Set the number of draft positions that each request wants. Only requests that draw a token in each step
        draft, and never more than they may still draw.
        """
        if self._guesser is None:
            return
        for one in running:
            most = min(self._tokens, one.left - 1)
            is_ready = one.known - one.computed == 1 and most > 0
            if not is_ready or self._paces.setdefault(one.id, DraftPace()).is_resting(one.known):
                one.drafts = 0
            else:
                one.drafts = self._guesser.offer(one, most, matchers.get(one.id))

    def guess(self, step: ScheduledStep, live: Mapping[int, LiveRequest], matchers: Mapping[int, Matcher]) -> None:
        """Draft as many tokens as the step has room for."""
        if self._guesser is None:
            return
        ends = {chunk.request: chunk.end - live[chunk.request].known for chunk in step.chunks}
        counts = {request: count for request, count in ends.items() if count > 0}
        guessed = self._guesser.guess(DraftBudget(step, live, matchers, counts))
        for request, count in counts.items():
            live[request].guessed = tuple(guessed[request])
            assert len(live[request].guessed) == count, "a chunk has as many guesses as positions for them"

    def judge(self, live: LiveRequest, drawn: Sequence[int]) -> None:
        """Compare the draft with the drawn tokens, and clear it."""
        guessed, live.guessed, live.drafts = live.guessed, (), 0
        if self._guesser is None or not guessed:
            return
        stood = sum(guess == token for guess, token in zip(guessed, drawn, strict=False))
        self.drafts += 1
        self.drafted_tokens += len(guessed)
        self.accepted_tokens += stood
        self._paces[live.id].judge(live.known, stood)
        self._guesser.judge(live.id, len(guessed), stood)

    def forget(self, request: int) -> None:
        """Drop a request that ended or was preempted."""
        if self._guesser is not None:
            self._paces.pop(request, None)
            self._guesser.forget(request)
