"""Goodput is counted from what a run tells, through losses, rollbacks and launches."""

import json
import os
from dataclasses import replace

import pytest

from reported import STEP
from superstep.observe.events import Evaluated, Fanout, Resumed, RolledBack, RunFinished, Saved
from superstep.observe.goodput import GoodputSink, sum_spent_s
from superstep.observe.jsonl import JsonLines

BACK = RolledBack(step=3, refused=6, why="", loss=9.0, grad_norm=9.0, source="memory", skip="3:4")


def steps(first, last):
    return [replace(STEP, step=step) for step in range(first, last + 1)]


class _Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def _run(path, events, *, began, earlier=0.0, clock):
    sink = GoodputSink(Fanout([JsonLines(path)]), path, began_at_s=began, earlier_s=earlier, clock=clock)
    for event in events:
        clock.now += getattr(event, "step_s", None) or getattr(event, "seconds", 0.0)
        sink.write(event)
    sink.close()
    return [json.loads(line) for line in path.read_text().splitlines() if '"goodput"' in line]


def _second(numbers):
    return [replace(event, step_s=1.0) for event in numbers]


def test_steps_count_as_long_as_they_stand(tmp_path):
    clock = _Clock(100.0)
    clock.now += 5  # to start
    told = _run(
        tmp_path / "metrics.jsonl",
        [
            *_second(steps(1, 5)),
            BACK,
            *_second(steps(4, 8)),
            Evaluated(step=8, loss=1.0, bits_per_byte=None, seconds=2.0),
            Saved(step=8, path="c", seconds=3.0, bytes=1),
            RunFinished(step=8, elapsed_s=0.0, tokens_seen=0),
        ],
        began=100.0,
        clock=clock,
    )
    assert [line["wall_s"] for line in told] == [5 + 5 + 5 + 2 + 3] * 2
    assert (told[-1]["steps_s"], told[-1]["validation_s"]) == (8.0, 2.0)
    assert told[-1]["ettr"] == pytest.approx(8 / 20)


def test_a_rank_that_is_replaced_goes_on_counting_and_a_launch_knows_the_ones_before(tmp_path):
    path, clock = tmp_path / "metrics.jsonl", _Clock(0.0)
    _run(path, [*_second(steps(1, 3)), Saved(step=3, path="c", seconds=1.0, bytes=1), *_second(steps(4, 6))],
         began=0.0, clock=clock)  # fmt: skip
    clock.now += 10  # noticed, and started again, in the same launch
    again = [
        Resumed(step=3, path="", lost="rank 1"),
        *_second(steps(4, 7)),
        Saved(step=7, path="c", seconds=0.0, bytes=1),
    ]
    told = _run(path, again, began=0.0, clock=clock)
    assert told[-1]["wall_s"] == 3 + 1 + 3 + 10 + 4
    assert told[-1]["steps_s"] == 7.0
    os.utime(path, (clock.now + 2, clock.now + 2))  # it lived so much longer
    earlier = sum_spent_s(path)
    assert earlier == 23.0
    clock.now += 1000  # nobody ran it
    later = [Resumed(step=7, path="c"), *_second(steps(8, 9)), RunFinished(step=9, elapsed_s=0.0, tokens_seen=0)]
    told = _run(path, later, began=clock.now, earlier=earlier, clock=clock)
    assert (told[-1]["wall_s"], told[-1]["steps_s"]) == (25.0, 9.0)
    assert sum_spent_s(tmp_path / "none") == 0.0
