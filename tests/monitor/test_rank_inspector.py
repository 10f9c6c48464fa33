"""What is seen of a rank from outside: code that holds the GIL, and code that is short of a processor."""

import os

import pytest

from superstep.monitor.hang_detector import WAKES_PER_S, Process, Thread
from superstep.monitor.rank_inspector import RankInspector, Vitals
from superstep.monitor.status_page import HeartbeatWriter, StatusPage
from superstep.program.instructions import Forward, Step

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

PROGRAM = (Forward(0, 0, "all"), Step())


@pytest.fixture
def view():
    """The page of a rank that works on an instruction, and whose ticker does not tick."""
    page = StatusPage()
    heart = HeartbeatWriter(os.dup(page.handle))
    heart.begin(PROGRAM, step=1)
    heart.rests()  # its ticker begins
    heart.begin(PROGRAM, step=2)
    heart.waits(0)
    heart.works(0)
    heart.stop()
    yield page.view
    page.close()


@pytest.mark.parametrize(
    ("process", "held_after_s"),
    [
        (lambda now_s: Process(0.0, is_ready=False), 1.0),  # who has the lock sleeps in C
        (lambda now_s: Process(now_s, is_ready=True), 1.0),  # it computes on a processor of its own
        (lambda now_s: Process(now_s / 12, is_ready=True), 9.0),  # on a twelfth of one
    ],
    ids=["asleep", "alone", "crowded"],
)
def test_a_lock_is_held_only_by_who_has_a_processor_or_wants_none(view, process, held_after_s):
    now_s = [0.0]
    looker = RankInspector(
        {0: view},
        clock=lambda: now_s[0],
        threads=lambda process, number: Thread("R", int(2 * WAKES_PER_S * now_s[0])),
        system=lambda number: Vitals(state="R"),
        processes=lambda number, ticker: process(now_s[0]),
    )
    held_s = []
    for _ in range(20):
        (seen,) = looker.look()
        held_s += [now_s[0]] if seen.is_held else []
        now_s[0] += 0.5
    assert held_s[0] == held_after_s
