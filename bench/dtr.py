"""Operations within a budget of memory, by dynamic tensor rematerialization (Kirisame 2021, arXiv
2006.09616).

Operations run in the order of their trace. Where the next has no room, the storage with the least

    h = cost / (bytes · staleness)

is evicted: cost are the seconds of its own operations and of its evicted neighbourhood, the evicted storages that it
would be computed from and those that are computed from it (sec. 4.1); staleness the seconds since its last use. What an
operation reads and is not there is computed again before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.dtr_trace import Event, Hold, OperationCall, Pin, Release
from superstep.errors import SuperstepError
from superstep.hardware.units import Array

Score = Callable[[Array, Array, Array], Array]
"""From costs in seconds, sizes in bytes and staleness in seconds: the storage with the least is evicted."""


def score_dtr(costs: Array, sizes: Array, ages: Array) -> Array:
    """h of the paper."""
    return costs / (sizes * ages)


def score_lru(costs: Array, sizes: Array, ages: Array) -> Array:
    """The storage that was used least recently goes first."""
    return 1 / ages


class BudgetExceeded(SuperstepError):
    """An operation has no room, although all that could be evicted was, or more is computed again than a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialization:
    """A trace that ran within a budget.

    Attributes:
        runs: the operations in the order in which they ran, by their number among those of the trace.
        evictions: how many operations had run, and the first value of the storage that was evicted then.
        once_s: the seconds of the trace without a budget.
        seconds: with it.
        peak_bytes: the most that was held.
    """

    runs: tuple[int, ...]
    evictions: tuple[tuple[int, int], ...]
    once_s: float
    seconds: float
    peak_bytes: int

    @property
    def overhead(self) -> float:
        """The seconds over those without a budget."""
        return self.seconds / self.once_s


def rematerialize(
    trace: Sequence[Event], budget_bytes: float, *, score: Score = score_dtr, most_overhead: float = np.inf
) -> Rematerialization:
    """Run a trace within a budget.

    Raises:
        BudgetExceeded: an operation has no room, or the overhead is above ``most_overhead``.
    """
    run = _Run(trace, budget_bytes, score, most_overhead)
    for event in trace:
        run.follow(event)
    return Rematerialization(
        runs=tuple(run.runs),
        evictions=tuple(run.evictions),
        once_s=run.once_s,
        seconds=run.clock_s,
        peak_bytes=run.peak_bytes,
    )


@dataclass(slots=True)
class _Storage:
    """Memory that one or several values share.

    Attributes:
        values: those that have been made.
        sources: the storages that its operations read.
        readers: the storages of operations that read it.
        references: of the trace.
        locks: of operations under way; one for ever where it is pinned.
    """

    values: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    references: int = 0
    locks: int = 0
    is_pinned: bool = False
    is_there: bool = False


@dataclass(slots=True)
class _Pending:
    """An operation that is to run, once its inputs are there."""

    number: int
    missing: list[int] | None = None


class _Run:
    """The state of a trace that runs within a budget. Storages have the number of their first value."""

    def __init__(self, trace: Sequence[Event], budget_bytes: float, score: Score, most_overhead: float) -> None:
        self.operations = [event for event in trace if isinstance(event, OperationCall)]
        self.budget_bytes, self.score = budget_bytes, score
        self.once_s = sum(operation.seconds for operation in self.operations)
        self.limit_s = self.once_s * most_overhead
        count = 1 + max((value for operation in self.operations for value in operation.outputs), default=0)
        self.maker = {value: n for n, operation in enumerate(self.operations) for value in operation.outputs}
        self.storage_of: list[int] = list(range(count))
        self.storages: dict[int, _Storage] = {}
        self.defined: set[int] = set()
        self.next = 0
        self.clock_s, self.held_bytes, self.peak_bytes = 0.0, 0, 0
        self.runs: list[int] = []
        self.evictions: list[tuple[int, int]] = []
        self.sizes, self.own_s, self.around_s, self.used_s = (np.zeros(count) for _ in range(4))
        self.can_go = np.zeros(count, dtype=bool)
        self.outdated: set[int] = set()

    def follow(self, event: Event) -> None:
        match event:
            case OperationCall():
                self.compute(self.next)
                for value in event.outputs:
                    self.storages[self.storage_of[value]].references += 1
                    self.used_s[self.storage_of[value]] = self.clock_s
                self.next += 1
            case Hold(value):
                self.storages[self.storage_of[value]].references += 1
            case Pin(value):
                if value not in self.defined:
                    self.compute(self.maker[value])
                self.storages[self.storage_of[value]].is_pinned = True
                self._update(self.storage_of[value])
            case Release(value):
                storage = self.storages[self.storage_of[value]]
                storage.references -= 1
                if not storage.references and storage.is_there and not storage.is_pinned:
                    self._evict(self.storage_of[value])

    def compute(self, number: int) -> None:
        """Run an operation, after all that it needs."""
        pending = [_Pending(number)]
        while pending:
            now = pending[-1]
            operation = self.operations[now.number]
            if now.missing is None:
                for value in operation.inputs:
                    self.used_s[self.storage_of[value]] = self.clock_s
                self._lock(value for value in operation.inputs if value in self.defined)
                now.missing = [value for value in reversed(operation.inputs) if value not in self.defined]
            elif now.missing and now.missing[-1] in self.defined:
                self._lock([now.missing.pop()])
            elif now.missing:
                pending.append(_Pending(self.maker[now.missing[-1]]))
            else:
                self._make_room(sum(operation.sizes))
                self._run(now.number, operation)
                for value in operation.inputs:
                    self.storages[self.storage_of[value]].locks -= 1
                    self._update(self.storage_of[value])
                pending.pop()

    def _lock(self, values: Iterable[int]) -> None:
        for value in values:
            self.storages[self.storage_of[value]].locks += 1
            self.can_go[self.storage_of[value]] = False

    def _update(self, storage: int) -> None:
        """Note whether a storage may be evicted."""
        it = self.storages[storage]
        self.can_go[storage] = it.is_there and not it.locks and not it.is_pinned and self.sizes[storage] > 0

    def _run(self, number: int, operation: OperationCall) -> None:
        self.clock_s += operation.seconds
        if self.clock_s > self.limit_s:
            raise BudgetExceeded(f"more than {self.limit_s:g} s are computed within {self.budget_bytes:g} bytes")
        self.runs.append(number)
        again = sum(
            size for value, size in zip(operation.outputs, operation.sizes, strict=True) if value in self.defined
        )
        self.held_bytes += sum(operation.sizes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.held_bytes -= again  # an operation makes all of its outputs, those that are there too
        if number == self.next:
            self._link(operation)
        for value in operation.outputs:
            self.defined.add(value)
            storage = self.storage_of[value]
            if not self.storages[storage].is_there:
                self._outdate(storage)
                self.storages[storage].is_there = True
                self.outdated.add(storage)
            self._update(storage)

    def _link(self, operation: OperationCall) -> None:
        """Note the storages of an operation that runs for the first time."""
        sources = {self.storage_of[value] for value in operation.inputs}
        for value, size, shared in zip(operation.outputs, operation.sizes, operation.shares, strict=True):
            storage = value if shared is None else self.storage_of[shared]
            self.storage_of[value] = storage
            self.storages.setdefault(storage, _Storage())
            if shared is None:
                self.sizes[storage] = size
        for storage in {self.storage_of[value] for value in operation.outputs}:
            self.own_s[storage] += operation.seconds
            self.storages[storage].sources |= sources - {storage}
            self.outdated.add(storage)
            for source in sources - {storage}:
                self.storages[source].readers.add(storage)
                self.outdated.add(source)
        for value in operation.outputs:
            self.storages[self.storage_of[value]].values.append(value)

    def _make_room(self, size: int) -> None:
        while self.held_bytes + size > self.budget_bytes:
            candidates = np.flatnonzero(self.can_go)
            if not len(candidates):
                raise BudgetExceeded(f"an operation that makes {size} bytes has no room in {self.budget_bytes:g} bytes")
            for storage in self.outdated.intersection(candidates.tolist()):
                self.around_s[storage] = self._sum_evicted(storage)
                self.outdated.discard(storage)
            with np.errstate(divide="ignore", invalid="ignore"):
                scores = self.score(
                    self.own_s[candidates] + self.around_s[candidates],
                    self.sizes[candidates],
                    self.clock_s - self.used_s[candidates],
                )
            self._evict(int(candidates[np.argmin(np.nan_to_num(scores, nan=0.0))]))

    def _evict(self, storage: int) -> None:
        it = self.storages[storage]
        it.is_there = False
        self.held_bytes -= int(self.sizes[storage])
        self.can_go[storage] = False
        self.defined.difference_update(it.values)
        self.evictions.append((len(self.runs), storage))
        self._outdate(storage)

    def _outdate(self, storage: int) -> None:
        """Forget the costs of the neighbours of what comes or goes."""
        for is_up in (True, False):
            _, edge = self._walk(storage, is_up=is_up)
            self.outdated |= edge

    def _sum_evicted(self, storage: int) -> float:
        """The seconds of a storage's evicted neighbourhood."""
        both = (self._walk(storage, is_up=is_up)[0] for is_up in (True, False))
        return float(sum(self.own_s[other] for evicted in both for other in evicted))

    def _walk(self, storage: int, *, is_up: bool) -> tuple[set[int], set[int]]:
        """The evicted storages before or behind one, through evicted ones alone; and those where they end."""
        evicted: set[int] = set()
        edge: set[int] = set()
        stack = [storage]
        while stack:
            it = self.storages[stack.pop()]
            for other in it.sources if is_up else it.readers:
                if self.storages[other].is_there:
                    edge.add(other)
                elif other not in evicted and other != storage:
                    evicted.add(other)
                    stack.append(other)
        return evicted, edge
