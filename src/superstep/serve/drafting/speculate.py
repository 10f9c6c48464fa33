"""Speculation: tokens are guessed behind the known ones of a request, and one step judges them all.

    known        a b c d             d was drawn last, its key is not there yet
    guessed              e f g
    rows               d e f g       one chunk; the logits of all four are wanted
    drawn              e f x         e and f stand, x is drawn where g was guessed: three tokens of one step

A draw is a function of the logits, the request's seed and the position, so a guess stands where it equals the draw, and
nothing else need be asked (Leviathan 2023 must accept by chance, and so draws other tokens than without guesses).
What is drawn does not depend on who guesses, nor on whether somebody does.
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
"""A request whose guesses are poor rests for 2 to this power of tokens at the most."""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """What one step may hold of guesses.

    Attributes:
        step: all of it.
        live: every request by its number.
        matchers: of those whose answers have a form.
        counts: for each request that the step gave room for guesses, how many.
    """

    step: ScheduledStep
    live: Mapping[int, LiveRequest]
    matchers: Mapping[int, Matcher]
    counts: Mapping[int, int]


class Drafter(Protocol):
    """Who guesses."""

    def offer(self, live: LiveRequest, most: int, matcher: Matcher | None) -> int:
        """How many tokens it would guess behind the known ones of a request, before the step is made."""

    def guess(self, budget: DraftBudget) -> Mapping[int, Sequence[int]]:
        """As many tokens as are asked for of each request. Called for every step, before it is computed."""

    def judged(self, request: int, guessed: int, stood: int) -> None:
        """How many of a request's guesses stood."""

    def forget(self, request: int) -> None:
        """A request ended, or its pages were taken back."""


class NgramDrafter:
    """Guesses from what the request's own text says."""

    def __init__(self) -> None:
        self._lookups: dict[int, PairLookup] = {}
        self._found: dict[int, tuple[int, ...]] = {}

    def offer(self, live: LiveRequest, most: int, matcher: Matcher | None) -> int:
        """As many as were found, up to the first that the answer's form does not allow."""
        draft = self._lookups.setdefault(live.id, PairLookup()).guess(live.tokens, most)
        if matcher is not None and draft:
            draft = draft[: matcher.legal(draft)]
        self._found[live.id] = draft
        return len(draft)

    def guess(self, budget: DraftBudget) -> Mapping[int, Sequence[int]]:
        """What was found, as far as there is room."""
        return {request: self._found[request][:count] for request, count in budget.counts.items()}

    def judged(self, request: int, guessed: int, stood: int) -> None:
        """The text says the same whatever became of it."""

    def forget(self, request: int) -> None:
        """Its text is read again from its start, should it go on."""
        self._lookups.pop(request, None)
        self._found.pop(request, None)


class DraftPace:
    """When one request guesses: one whose guesses are poor rests for some tokens, and longer each time.

    A miss counts one, and each guess that stood makes up for one. After the n-th miss on balance the request rests
    until 2^n more tokens are known. So it depends on the request's own tokens alone.
    """

    def __init__(self) -> None:
        self._misses = 0
        self._until = 0

    def is_resting(self, known: int) -> bool:
        """Whether a request with so many tokens does not guess."""
        return known < self._until

    def judged(self, known: int, stood: int) -> None:
        """So many guesses of a step stood; then it had so many tokens."""
        self._misses = max(0, self._misses - stood) if stood else min(MOST_MISSES, self._misses + 1)
        self._until = 0 if stood else known + 2**self._misses


class Speculation:
    """The engine's guesses.

    Args:
        guesser: who guesses; None where nobody does.
        tokens: the most tokens guessed for one request in a step.
    """

    def __init__(self, guesser: Drafter | None = None, tokens: int = 0) -> None:
        self._guesser = guesser
        self._tokens = tokens
        self._paces: dict[int, DraftPace] = {}
        self.drafts = self.drafted_tokens = self.accepted_tokens = 0

    def offer(self, running: Iterable[LiveRequest], matchers: Mapping[int, Matcher]) -> None:
        """Say of each request how many positions it would like behind its known ones. Only those that draw a token for
        each step guess, and never more than they may still draw.
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
        """Guess as many tokens as the step has room for."""
        if self._guesser is None:
            return
        ends = {chunk.request: chunk.end - live[chunk.request].known for chunk in step.chunks}
        counts = {request: count for request, count in ends.items() if count > 0}
        guessed = self._guesser.guess(DraftBudget(step, live, matchers, counts))
        for request, count in counts.items():
            live[request].guessed = tuple(guessed[request])
            assert len(live[request].guessed) == count, "a chunk has as many guesses as positions for them"

    def judge(self, live: LiveRequest, drawn: Sequence[int]) -> None:
        """Learn from what was drawn where a request guessed, and let go of the guesses."""
        guessed, live.guessed, live.drafts = live.guessed, (), 0
        if self._guesser is None or not guessed:
            return
        stood = sum(guess == token for guess, token in zip(guessed, drawn, strict=False))
        self.drafts += 1
        self.drafted_tokens += len(guessed)
        self.accepted_tokens += stood
        self._paces[live.id].judged(live.known, stood)
        self._guesser.judged(live.id, len(guessed), stood)

    def forget(self, request: int) -> None:
        """A request ended, or its pages were taken back."""
        if self._guesser is not None:
            self._paces.pop(request, None)
            self._guesser.forget(request)
