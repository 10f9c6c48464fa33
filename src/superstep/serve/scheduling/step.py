"""An engine step as a value: the positions of requests that are computed, and their pages.

    Chunk(request=7, first=512, count=256, ...)     a part of a long prompt
    Chunk(request=3, first=90, count=1, ...)        one new token
    Chunk(request=4, first=41, count=4, ...)        one new token and three draft tokens

Prompt, new token and draft are treated alike: positions without keys in the cache. The scheduler makes a step,
``check`` verifies its rules, the executor runs it; the simulator and a replay read the same value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from superstep.errors import SuperstepError


class RunningRequest(Protocol):
    """A request as the scheduler reads it.

    Attributes:
        id: its number.
        known: tokens of the prompt and the answer so far.
        computed: of these, those with keys in the cache.
        pages: its block table.
        drafts: draft tokens after the known ones.
    """

    @property
    def id(self) -> int: ...
    @property
    def known(self) -> int: ...
    @property
    def computed(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def drafts(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRange:
    """Positions of one request.

    Attributes:
        request: its number.
        first: the first position; all earlier keys are in the cache.
        count: positions.
        pages: the request's block table after the step, with as many pages as the positions up to the last one need.
        shared: number of its first pages from the prefix cache, which are not written; set when a request starts.
    """

    request: int
    first: int
    count: int
    pages: tuple[int, ...]
    shared: int = 0

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """One step of the engine.

    Attributes:
        chunks: in the order of their rows.
        frees: requests that are preempted before the step; they start again later.
        version: of the weights, the same for all.
    """

    chunks: tuple[PositionRange, ...]
    frees: tuple[int, ...] = ()
    version: str = ""

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one step.

    Attributes:
        tokens: the most rows.
        requests: the most requests that run at once.
    """

    tokens: int
    requests: int


class InvalidStep(SuperstepError):
    """A step breaks a rule; the message names the request and the rule."""


def check(
    step: ScheduledStep, live: Mapping[int, RunningRequest], budget: Budget, *, page_tokens: int, version: str
) -> None:
    """Check a step's rules before it is computed.

    Args:
        step: the step.
        live: every request by its number, in the state before the step.
        budget: limits of a step.
        page_tokens: positions of one page.
        version: of the weights in place.

    Raises:
        InvalidStep: the message names the rule.
    """
    if step.version != version:
        raise InvalidStep(f"the step is made for weights {step.version}, and {version} are in place.")
    if step.tokens > budget.tokens or len(step.chunks) > budget.requests:
        raise InvalidStep(
            f"{step.tokens} tokens of {len(step.chunks)} requests, more than {budget.tokens} of {budget.requests}."
        )
    named = Counter([*(chunk.request for chunk in step.chunks), *step.frees])
    twice = [request for request, count in named.items() if count > 1]
    if twice:
        raise InvalidStep(f"request {twice[0]} is named twice.")
    for request in named:
        if request not in live:
            raise InvalidStep(f"request {request} is not there.")
    for chunk in step.chunks:
        _check_chunk(chunk, live[chunk.request], page_tokens)
    _check_writes(step, live, page_tokens)


def _check_chunk(chunk: PositionRange, request: RunningRequest, page_tokens: int) -> None:
    who = f"request {chunk.request}"
    there = chunk.shared * page_tokens if chunk.shared else request.computed
    if chunk.count < 1 or chunk.end > request.known + request.drafts:
        raise InvalidStep(f"{who}: positions {chunk.first} to {chunk.end} of {request.known + request.drafts}.")
    if chunk.first != there:
        raise InvalidStep(f"{who}: begins at {chunk.first}, and the keys before {there} are there.")
    if chunk.shared and request.pages:
        raise InvalidStep(f"{who}: finds pages while it has some.")
    if tuple(request.pages) != chunk.pages[: len(request.pages)]:
        raise InvalidStep(f"{who}: its table was changed, not made longer.")
    if len(chunk.pages) != -(-chunk.end // page_tokens):
        raise InvalidStep(f"{who}: {len(chunk.pages)} pages for {chunk.end} positions of {page_tokens} a page.")


def _check_writes(step: ScheduledStep, live: Mapping[int, RunningRequest], page_tokens: int) -> None:
    """No page has two writers, nor a writer and another reader."""
    freed = set(step.frees)
    tables = {number: request.pages for number, request in live.items() if number not in freed}
    tables |= {chunk.request: chunk.pages for chunk in step.chunks}
    readers = Counter(page for table in tables.values() for page in table)
    for chunk in step.chunks:
        for page in chunk.pages[chunk.first // page_tokens :]:
            if readers[page] > 1:
                raise InvalidStep(f"request {chunk.request}: writes to page {page}, which another one reads.")
