"""Dynamic tensor rematerialization of traces: its promises, chains, small optima, and the format of simrd."""

from __future__ import annotations

import heapq
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.dtr import BudgetExceeded, _Run, rematerialize, score_lru
from bench.dtr_trace import Hold, OperationCall, Pin, Release, make_chain, make_value
from bench.simrd_traces import read_trace
from plans import examples

MOST_FORWARDS = 2.5
"""The most forward passes of a unit in room for 2 · √units."""


def count_forwards(units, **options):
    """The forward passes that a chain takes in room for 2 · √units, for each unit."""
    result = rematerialize(make_chain(units), 2 * math.sqrt(units), **options)
    assert result.peak_bytes <= 2 * math.sqrt(units)
    return sum(run < units for run in result.runs) / units


@pytest.mark.parametrize("units", [64, 256, 1024])
def test_a_chain_takes_few_forward_passes_in_room_for_twice_its_root(units):
    assert count_forwards(units) <= MOST_FORWARDS


def test_least_recently_used_fails_that_bar():
    assert count_forwards(144, score=score_lru) > MOST_FORWARDS


def test_a_cost_without_the_neighbourhood_fails_that_bar(monkeypatch):
    """Every storage of a chain costs the same then."""
    monkeypatch.setattr(_Run, "_sum_evicted", lambda run, storage: 0.0)
    assert count_forwards(144) > MOST_FORWARDS


@pytest.mark.long
def test_a_chain_of_4096_units():
    assert count_forwards(4096) <= MOST_FORWARDS
    assert count_forwards(1024, score=score_lru) > 8


def find_optimum(units, budget):
    """The least seconds of a chain, by Dijkstra's algorithm over what is there after each pass."""
    best, heap, number = {(0, frozenset()): 0}, [(0, 0, (0, frozenset()))], 0
    while heap:
        seconds, _, state = heapq.heappop(heap)
        if best[state] < seconds:
            continue
        passes, there = state
        if passes == 2 * units:
            return seconds
        gradients = int(passes > units)
        following = [(0, (passes, there - {value})) for value in there]
        made = range(min(passes + 1, units))
        forwards = [i for i in made if i not in there and (i == 0 or i - 1 in there)]
        if len(there) + gradients + 1 <= budget:
            following += [(1, (passes + (i == passes), there | {i})) for i in forwards]
        back = 2 * units - 1 - passes
        left = frozenset(value for value in there if value < back)
        if passes >= units and (back == 0 or back - 1 in there) and len(left) + gradients + 1 <= budget:
            following.append((1, (passes + 1, left)))
        for cost, after in following:
            if seconds + cost < best.get(after, math.inf):
                best[after], number = seconds + cost, number + 1
                heapq.heappush(heap, (seconds + cost, number, after))
    return math.inf


@pytest.mark.parametrize("units", [6, 8])
def test_short_chains_are_within_5_percent_of_the_optimum(units):
    budget = math.ceil(2 * math.sqrt(units))
    for room in range(budget - 1, budget + 3):
        assert rematerialize(make_chain(units), room).seconds <= 1.05 * find_optimum(units, room)


@st.composite
def traces(draw):
    """Operations on values of any size, some with two outputs or an output that shares the storage of an input."""
    events, living, count = [], [], 0
    for _ in range(draw(st.integers(3, 14))):
        inputs = tuple(draw(st.lists(st.sampled_from(living), max_size=3, unique=True))) if living else ()
        outputs = tuple(range(count, count + draw(st.integers(1, 2))))
        shared = draw(st.booleans()) if inputs else False
        shares = tuple(inputs[0] if shared else None for _ in outputs)
        sizes = tuple(0 if shared else draw(st.integers(1, 9)) for _ in outputs)
        events.append(OperationCall(float(draw(st.integers(1, 9))), inputs, outputs, sizes, shares))
        count += len(outputs)
        living += outputs
        if len(living) > 3 and draw(st.booleans()):
            events.append(Release(living.pop(draw(st.integers(0, len(living) - 1)))))
    return (*events, *(Pin(value) for value in living[-1:]))


def replay(trace, result, budget):
    """Follow the runs and evictions of a result: what each run reads is there, and no more than the budget is."""
    operations = [event for event in trace if isinstance(event, OperationCall)]
    storage = {}
    for operation in operations:
        for value, shared in zip(operation.outputs, operation.shares, strict=True):
            storage[value] = value if shared is None else storage[shared]
    size = {value: n for o in operations for value, n in zip(o.outputs, o.sizes, strict=True)}
    evictions, defined, seen = list(result.evictions), set(), []
    for done, number in enumerate(result.runs):
        while evictions and evictions[0][0] == done:
            gone = evictions.pop(0)[1]
            assert any(storage[value] == gone for value in defined)
            defined -= {value for value in defined if storage[value] == gone}
        operation = operations[number]
        assert set(operation.inputs) <= defined
        held = sum(size[one] for one in {storage[value] for value in defined}) + sum(operation.sizes)
        assert held <= budget
        seen.append(held)
        defined |= set(operation.outputs)
    assert max(seen) == result.peak_bytes


@examples(200)
@given(trace=traces(), share=st.floats(0.3, 1.0))
def test_every_trace_runs_within_its_budget(trace, share):
    whole = rematerialize(trace, math.inf)
    assert whole.overhead == 1
    assert whole.runs == tuple(range(len(whole.runs)))
    try:
        result = rematerialize(trace, share * whole.peak_bytes)
    except BudgetExceeded:
        return
    replay(trace, result, share * whole.peak_bytes)
    assert set(result.runs) == set(whole.runs)
    assert result.seconds >= whole.seconds


def test_what_is_pinned_stays_and_what_has_no_room_is_refused():
    trace = (make_value(1.0, (), 0, 4), Pin(0), make_value(1.0, (0,), 1, 4), make_value(1.0, (0,), 2, 4), Pin(1))
    with pytest.raises(BudgetExceeded, match="no room in 7 bytes"):
        rematerialize(trace, 7)
    with pytest.raises(BudgetExceeded, match=r"more than 3.3 s are computed"):
        rematerialize(trace, 8, most_overhead=1.1)
    result = rematerialize(trace, 8)
    assert result.runs == (0, 1, 2, 1)


LINES = [
    {"INSTRUCTION": "CONSTANT", "NAME": "before"},
    {"INSTRUCTION": "MEMORY", "NAME": "before", "MEMORY": "1"},
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
    {"INSTRUCTION": "CONSTANT", "NAME": "w"},
    {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "8"},
    {"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": ["w"], "RESULT": ["x", "v"], "TIME": "5"},
    {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "16"},
    {"INSTRUCTION": "ALIAS", "NAME": "x", "ALIAS": "-1"},
    {"INSTRUCTION": "MEMORY", "NAME": "v", "MEMORY": "8"},
    {"INSTRUCTION": "ALIAS", "NAME": "v", "ALIAS": "0"},
    {"INSTRUCTION": "COPY", "DST": "y", "SRC": "x"},
    {"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["v", "y"], "MUTATE": [1], "TIME": "2"},
    {"INSTRUCTION": "COPY_FROM", "DST": "x", "SRC": "y"},
    {"INSTRUCTION": "RELEASE", "NAME": "x"},
    {"INSTRUCTION": "RELEASE", "NAME": "before"},
]


def test_a_trace_of_simrd_is_read():
    """Each instruction once: x (value 1) and a view of the weight, x changed in place (value 3), names that move on."""
    events = read_trace(json.dumps(line) for line in LINES)
    assert events == (
        OperationCall(0.0, (), (0,), (8,), (None,)),
        Pin(0),
        OperationCall(5.0, (0,), (1, 2), (16, 0), (None, 0)),
        Hold(1),
        OperationCall(2.0, (2, 1), (3,), (16,), (None,)),
        Release(1),
        Release(1),
        Hold(3),
        Release(3),
        Pin(0),
        Pin(2),
        Pin(3),
    )
    assert rematerialize(events, math.inf).peak_bytes == 40
    with pytest.raises(ValueError, match="FREE"):
        read_trace(json.dumps(line) for line in [LINES[2], {"INSTRUCTION": "FREE"}])
