"""The order of a run's tasks, after exchanges and with some left out."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from superstep.tune.program.task_order import TaskOrder
from superstep.tune.rl.rollout_log import NAME, RolloutLog

places = st.integers(0, 9)
changes = st.lists(
    st.one_of(st.tuples(st.just("exchange"), places, places), st.tuples(st.just("leave"), places, places))
)


@given(changes)
def test_each_place_has_a_task_of_its_own_and_later_ones_move_up(changes):
    order, tasks = TaskOrder(), list(range(200))
    for kind, first, other in changes:
        if kind == "exchange":
            order.exchange(first, other)
            tasks[first], tasks[other] = tasks[other], tasks[first]
        else:
            order.leave_out(first, other)
            del tasks[first : first + other]
    assert [order.task(place) for place in range(20)] == tasks[:20]
    assert [order.place(task) for task in range(20)] == [
        tasks.index(task) if task in tasks else None for task in range(20)
    ]
    assert order.differences(range(20)) == {n: task for n, task in enumerate(tasks[:20]) if n != task}


def test_what_is_left_out_is_dropped_from_the_record_with_what_comes_later(tmp_path):
    group = {"answers": [], "took_s": [1.0, 2.0]}
    lines = [{"group": n, "version": n // 2} | group for n in range(8)] + [{"published": 3, "name": "three"}]
    (tmp_path / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = RolloutLog(tmp_path / NAME)
    record.leave_out("2:1", 2)
    assert sorted(record.groups) == [0, 1, 2, 3]
    assert record.published == {}
    assert (record.gaps, record.task(4), record.place(6)) == ((2,), 6, 4)
    record.close()
    again = RolloutLog(tmp_path / NAME, is_kept=False)
    assert (sorted(again.groups), again.skips, again.task(4)) == ([0, 1, 2, 3], ["2:1"], 6)
