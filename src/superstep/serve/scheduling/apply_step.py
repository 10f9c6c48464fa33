"""Apply a step to the requests' state: running, waiting, and their pages. Shared by engine and simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.serve.scheduling.step import PositionRange, ScheduledStep


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of one step.

    Attributes:
        preemptions: requests that lost their pages.
        queried_tokens: of texts that were looked up in the prefix cache.
        hit_tokens: of these, the cached ones.
    """

    preemptions: int
    queried_tokens: int
    hit_tokens: int


def book(
    step: ScheduledStep,
    live: Mapping[int, LiveRequest],
    running: list[LiveRequest],
    waiting: list[LiveRequest],
    pages: Pages,
) -> StepCounts:
    """Take pages from preempted requests and give pages to scheduled ones. Both queues keep their order."""
    queried = hit = 0
    for number in step.frees:
        one = live[number]
        pages.release(one.pages)
        one.restart()
        running.remove(one)
        waiting.append(one)
    for chunk in step.chunks:
        one = live[chunk.request]
        if one in waiting:
            waiting.remove(one)
            running.append(one)
            pages.share(chunk.pages[: chunk.shared])
            one.pages = chunk.pages[: chunk.shared]
            one.cached_tokens = min(chunk.first, len(one.request.prompt))
            queried += one.known
            hit += chunk.first
    for chunk in step.chunks:
        one = live[chunk.request]
        pages.take(chunk.pages[len(one.pages) :])
        one.pages = chunk.pages
    waiting.sort(key=lambda one: one.urgency)
    running.sort(key=lambda one: one.urgency)
    return StepCounts(len(step.frees), queried, hit)


def book_computed(live: LiveRequest, chunk: PositionRange, pages: Pages, *, end: int, version: str) -> None:
    """Mark positions up to ``end`` as computed: full pages enter the prefix cache, pages after ``end`` are released."""
    live.computed = end
    full = range(chunk.first // pages.page_tokens, end // pages.page_tokens)
    if live.is_mixed:
        full = range(
            0
        )  # keys of several weights: cached under the new version, they would answer other requests with old keys
    keys = live.keys(version) if full else []
    for page in full:
        pages.publish(chunk.pages[page], keys[page])
    held = -(-end // pages.page_tokens)
    if len(live.pages) > held:
        pages.release(live.pages[held:])
        live.pages = live.pages[:held]
