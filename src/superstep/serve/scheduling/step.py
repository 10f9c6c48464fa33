"""An engine step as a value: which positions of which requests are computed, and into which pages.

    Chunk(request=7, first=512, count=256, ...)     a part of a long prompt
    Chunk(request=3, first=90, count=1, ...)        one new token
    Chunk(request=4, first=41, count=4, ...)        one new token and three drafted ones, to be judged

Prompt, new token and draft are one thing: positions whose keys are not there yet. The schedule makes a step, ``check``
holds it against the rules, the executor runs it; the simulator and a replay read the same value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from superstep.errors import SuperstepError


class RunningRequest(Protocol):
    """A request on its way, as the schedule sees it.

    Attributes:
        id: its number.
        known: tokens that it has: the prompt's, and those drawn so far.
        computed: of these, the ones whose keys and values are there.
        pages: its table.
        drafts: tokens guessed behind the known ones.
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
        first: the first position; the keys of all before it are there.
        count: positions.
        pages: the request's table after the step, as many pages as the positions up to the last one need.
        shared: of these, the first ones that were found and are not written to; known when a request begins.
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
    """What the engine does at once.

    Attributes:
        chunks: in the order of their rows.
        frees: requests whose pages are taken back before; they begin again later.
        version: of the weights, the same for all.
    """

    chunks: tuple[PositionRange, ...]
    frees: tuple[int, ...] = ()
    version: str = ""

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one step may hold.

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
    """Hold a step against the rules, before anything is computed.

    Args:
        step: the step.
        live: every request by its number, as it is before the step.
        budget: what a step may hold.
        page_tokens: positions of one page.
        version: of the weights that are in place.

    Raises:
        InvalidStep: the message says which rule.
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
    """No page is written by two, nor by one while another reads it."""
    freed = set(step.frees)
    tables = {number: request.pages for number, request in live.items() if number not in freed}
    tables |= {chunk.request: chunk.pages for chunk in step.chunks}
    readers = Counter(page for table in tables.values() for page in table)
    for chunk in step.chunks:
        for page in chunk.pages[chunk.first // page_tokens :]:
            if readers[page] > 1:
                raise InvalidStep(f"request {chunk.request}: writes to page {page}, which another one reads.")
