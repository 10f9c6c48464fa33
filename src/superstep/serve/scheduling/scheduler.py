"""The scheduler: a pure function that chooses the positions of the next step. The engine applies its result.

Running requests come first, by priority and arrival, and share the step's rows; waiting requests get the rest. A long
prompt is computed over several steps (chunked prefill, Agrawal 2023), beside the new tokens of others (continuous
batching, Yu 2022). When pages run out, the least urgent request is preempted: it returns its pages and starts again
later, from its pages that are still cached (Kwon 2023). Draft tokens come last: they take only rows and pages that are
left over in this step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Protocol

from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.step import Budget, PositionRange, RunningRequest, ScheduledStep


class WaitingRequest(RunningRequest, Protocol):
    """A request without pages."""

    def page_keys(self) -> Sequence[bytes]:
        """Keys of the full pages that it may share; at least its last token is not in them."""


def schedule(
    running: Sequence[RunningRequest], waiting: Sequence[WaitingRequest], pages: Pages, budget: Budget, *, version: str
) -> ScheduledStep:
    """The next step. Read-only.

    Args:
        running: requests with pages, the most urgent first.
        waiting: requests without pages, in the order of their start.
        pages: the pages of the KV cache and their users.
        budget: limits of a step.
        version: version of the current weights.
    """
    plan = _Plan(pages, budget)
    kept = list(running)
    at = 0
    while at < len(kept):
        request = kept[at]
        count = min(request.known - request.computed, plan.left_tokens)
        if count <= 0 or plan.grow(request, count):
            at += 1
        else:
            plan.free(kept.pop())  # the request itself, if it is the last
    if not plan.frees:
        for request in waiting:
            if len(kept) >= budget.requests or plan.left_tokens <= 0 or not plan.begin(request):
                break
            kept.append(request)
        plan.draft({request.id: request for request in running if request.drafts})
    return ScheduledStep(chunks=tuple(plan.chunks), frees=tuple(plan.frees), version=version)


class _Plan:
    """A step under construction, with the pages as they would be after it."""

    def __init__(self, pages: Pages, budget: Budget) -> None:
        self._pages = pages
        self._claimed: set[int] = set()
        self._taken: set[int] = set()
        self._released: list[int] = []
        self.left_tokens = budget.tokens
        self.chunks: list[PositionRange] = []
        self.frees: list[int] = []

    def grow(self, request: RunningRequest, count: int) -> bool:
        """Give a running request ``count`` positions; False if there are too few pages."""
        fresh = self._fresh(self._missing(request.computed + count, len(request.pages)))
        if fresh is None:
            return False
        self._add(request, request.computed, count, (*request.pages, *fresh), shared=0)
        return True

    def begin(self, request: WaitingRequest) -> bool:
        """Start a waiting request, with as many positions as the step has room for."""
        # A page that another request writes in this step is no longer in the prefix cache.
        cached = list(takewhile(lambda page: page not in self._taken, self._pages.lookup(request.page_keys())))
        first = len(cached) * self._pages.page_tokens
        count = min(request.known - first, self.left_tokens)
        claimed = {page for page in cached if self._pages.is_free(page) and page not in self._claimed}
        self._claimed |= claimed
        fresh = self._fresh(self._missing(first + count, len(cached)))
        if fresh is None:
            self._claimed -= claimed
            return False
        self._add(request, first, count, (*cached, *fresh), shared=len(cached))
        return True

    def draft(self, requests: Mapping[int, RunningRequest]) -> None:
        """Add draft positions of running requests, as far as rows and free pages are left over."""
        for at, chunk in enumerate(self.chunks):
            request = requests.get(chunk.request)
            if request is None or chunk.end < request.known:
                continue
            for count in range(min(request.drafts, self.left_tokens), 0, -1):
                fresh = self._fresh(self._missing(chunk.end + count, len(chunk.pages)))
                if fresh is not None:
                    self.chunks[at] = replace(chunk, count=chunk.count + count, pages=(*chunk.pages, *fresh))
                    self.left_tokens -= count
                    break

    def free(self, request: RunningRequest) -> None:
        """Preempt a running request."""
        self.frees.append(request.id)
        self._released += request.pages
        taken = next((chunk for chunk in self.chunks if chunk.request == request.id), None)
        assert taken is None, "the least urgent request is the last to get its share"

    def _missing(self, positions: int, held: int) -> int:
        return -(-positions // self._pages.page_tokens) - held

    def _fresh(self, count: int) -> list[int] | None:
        """Unclaimed free pages; None if there are too few."""
        if count <= 0:
            return []
        pages = list(islice(self._pages.next_free(without=self._claimed), count))
        if len(pages) < count:
            # Pages that only a preempted request used come last: its next start may find them in the prefix cache.
            givers = Counter(self._released)
            spare = [p for p in reversed(givers) if p not in self._claimed and self._pages.users(p) == givers[p]]
            pages += spare[: count - len(pages)]
        if len(pages) < count:
            return None
        self._claimed.update(pages)
        self._taken.update(pages)
        return pages

    def _add(self, request: RunningRequest, first: int, count: int, table: tuple[int, ...], *, shared: int) -> None:
        self.chunks.append(PositionRange(request=request.id, first=first, count=count, pages=table, shared=shared))
        self.left_tokens -= count
