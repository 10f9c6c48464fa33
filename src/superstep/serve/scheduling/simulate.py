"""Simulator of a server: the engine's own scheduler, with a cost function in place of the model.

    arrivals ──► schedule ──check──► price ──► when each request has its first token, its last, and how long it waited

Requests, pages, scheduler and ``check`` are those of the engine; a cost function gives the seconds of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from superstep.cost.serve import ComputeMode, StepWork
from superstep.serve.scheduling.apply_step import book, book_computed
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import Request, Sampling
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.serve.scheduling.scheduler import schedule
from superstep.serve.scheduling.step import Budget, check
from superstep.serve.scheduling.step_log import StepEntry, fact_of, work_of

VERSION = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request's arrival.

    Attributes:
        at_s: time of arrival.
        prompt_tokens: of its prompt.
        answer_tokens: of its answer; it never ends earlier.
        is_greedy: whether it takes the likeliest tokens.
        same: length of the prefix that all requests share.
    """

    at_s: float = 0.0
    prompt_tokens: int
    answer_tokens: int
    is_greedy: bool = True
    same: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """Times of a request.

    Attributes:
        arrived_s: arrival.
        began_s: start of its first computed position.
        first_s: its first token.
        last_s: its last token.
        tokens: of its answer.
    """

    arrived_s: float
    began_s: float
    first_s: float
    last_s: float
    tokens: int

    @property
    def first_token_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def wait_s(self) -> float:
        """From its arrival to its start."""
        return self.began_s - self.arrived_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Results of a simulation.

    Attributes:
        served: each request, in the order of arrivals.
        entries: the steps.
        works: of the steps.
        preemptions: times that a request lost its pages.
    """

    served: tuple[SimulatedRequest, ...]
    entries: tuple[StepEntry, ...]
    works: tuple[StepWork, ...]
    preemptions: int

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max(one.last_s for one in self.served)

    @property
    def tokens_per_s(self) -> float:
        return sum(one.tokens for one in self.served) / self.seconds


def simulate(
    arrivals: Sequence[Arrival],
    price: Callable[[StepWork], float],
    *,
    pages: Pages,
    budget: Budget,
    way: ComputeMode,
    context_tokens: int,
    window: int | None = None,
) -> Simulated:
    """Simulate requests.

    Args:
        arrivals: sorted by time.
        price: seconds of a step.
        pages: initial state.
        budget: of a step.
        way: how steps are computed.
        context_tokens: the most tokens of a prompt and its answer.
        window: number of tokens that a row attends to; None for all.
    """
    clock = _Clock(arrivals, pages, context_tokens)
    entries: list[StepEntry] = []
    works: list[StepWork] = []
    preemptions = 0
    while clock.has_work():
        step = schedule(clock.running, clock.waiting, pages, budget, version=VERSION)
        assert step.chunks, "every request fits alone"
        live = {one.id: one for one in (*clock.running, *clock.waiting)}
        check(step, live, budget, page_tokens=pages.page_tokens, version=VERSION)
        facts = {chunk.request: fact_of(live[chunk.request]) for chunk in step.chunks}
        entry = StepEntry(at_s=clock.now_s, took_s=0.0, step=step, facts=facts)
        works.append(work_of(entry, way, window))
        entries.append(replace(entry, took_s=price(works[-1])))
        preemptions += book(step, live, clock.running, clock.waiting, pages).preemptions
        clock.run(entries[-1], live)
    served = tuple(clock.list_results())
    return Simulated(served=served, entries=tuple(entries), works=tuple(works), preemptions=preemptions)


class _Clock:
    """Requests and the simulated time."""

    def __init__(self, arrivals: Sequence[Arrival], pages: Pages, context_tokens: int) -> None:
        self.running: list[LiveRequest] = []
        self.waiting: list[LiveRequest] = []
        self.now_s = 0.0
        self._arrivals, self._pages = arrivals, pages
        self._coming = [
            LiveRequest(
                _request(number, one),
                order=number,
                page_tokens=pages.page_tokens,
                end_of_text=(),
                context_tokens=context_tokens,
            )
            for number, one in enumerate(arrivals)
        ]
        self._arrived = 0
        self._began: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def has_work(self) -> bool:
        """Whether a request is left; moves the time to the next arrival while idle."""
        while self._arrived < len(self._coming):
            at_s, is_idle = self._arrivals[self._arrived].at_s, not (self.running or self.waiting)
            if at_s > self.now_s and not is_idle:
                break
            self.now_s = max(self.now_s, at_s)
            self.waiting.append(self._coming[self._arrived])
            self._arrived += 1
        for one in self.waiting:
            one.began(VERSION)
        return bool(self.running or self.waiting)

    def run(self, entry: StepEntry, live: Mapping[int, LiveRequest]) -> None:
        """Advance the time by a step, and apply its results."""
        for chunk in entry.step.chunks:
            self._began.setdefault(chunk.request, self.now_s)
        self.now_s += entry.took_s
        for chunk in entry.step.chunks:
            one = live[chunk.request]
            book_computed(one, chunk, self._pages, end=chunk.end, version=VERSION)
            if chunk.end < one.known:
                continue
            self._first.setdefault(one.id, self.now_s)
            if one.take(0) is not None:
                self._last[one.id] = self.now_s
                self.running.remove(one)
                self._pages.release(one.pages)
                one.restart()

    def list_results(self) -> Iterator[SimulatedRequest]:
        """Results of each request."""
        for number, one in enumerate(self._arrivals):
            yield SimulatedRequest(
                arrived_s=one.at_s,
                began_s=self._began[number],
                first_s=self._first[number],
                last_s=self._last[number],
                tokens=len(self._coming[number].drawn),
            )


def _request(number: int, arrival: Arrival) -> Request:
    own = arrival.prompt_tokens - arrival.same
    sampling = Sampling(
        max_tokens=arrival.answer_tokens, temperature=0.0 if arrival.is_greedy else 1.0, ignore_eos=True
    )
    return Request(id=number, prompt=(0,) * arrival.same + (number + 1,) * own, sampling=sampling)
