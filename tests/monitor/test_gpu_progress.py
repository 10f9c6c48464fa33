"""How far a GPU has come in what its host has issued: events on a stream that is made up."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field, replace

import pytest

from superstep.monitor import hang_rules
from superstep.monitor.activity import Activity
from superstep.monitor.gpu_progress import StreamMarks
from superstep.monitor.hang_detector import HangDetector, Thread
from superstep.monitor.rank_inspector import RankInspector
from superstep.monitor.status_page import HeartbeatWriter, StatusPage
from superstep.monitor.stopped_process import LOOK_S
from superstep.program.instructions import Backward, Fetch, Forward, Step

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

PROGRAM = (Fetch(0), Forward(0, 0, "all"), Backward(0, 0), Step())
DEADLINE_S = 30.0


@dataclass
class Stream:
    """A stream that comes as far as it is let, and the events on it in order."""

    recorded: list = field(default_factory=list)
    reached: int = 0
    has_failed: bool = False
    threads: list = field(default_factory=list)

    def event(self):
        return Event(self)

    def enter(self):
        self.threads.append(threading.current_thread().name)


class Event:
    def __init__(self, stream):
        self._stream, self.at = stream, None

    def record(self):
        if self._stream.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._stream.recorded.append(self)
        self.at = len(self._stream.recorded)

    def query(self):
        if self._stream.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.at <= self._stream.reached


@pytest.fixture
def rank():
    """A page, the heart that writes it, and the stream of its GPU."""
    page, stream = StatusPage(":0"), Stream()
    heart = HeartbeatWriter(os.dup(page.handle), marks=StreamMarks(stream.event, stream.enter))
    yield page, heart, stream
    heart.stop()
    page.close()


def issue(heart, step=1, program=PROGRAM):
    """What the executor tells as its host goes through a program, far ahead of the GPU."""
    heart.begin(program, step=step)
    for index, _ in enumerate(program):
        heart.waits(index)
        heart.works(index)
    heart.waits()
    heart.rests()


def until(page, passed):
    """What the page says once the rank's own thread has seen so many events pass."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        gpu = page.read().gpu
        if gpu is not None and gpu.passed >= passed:
            return gpu
        assert time.monotonic() < until_s, gpu
        time.sleep(0.01)


def test_a_page_says_where_the_gpu_is_and_not_where_its_host_has_come_to(rank):
    page, heart, stream = rank
    assert page.read().gpu is None
    issue(heart)
    assert page.read().doing is Activity.OTHER, "the host has issued everything"
    stream.reached = 4
    gpu = until(page, 4)
    assert (gpu.issued, gpu.passed, gpu.doing, gpu.step, gpu.index) == (10, 4, Activity.WORKS, 1, 1)
    assert gpu.instruction == "forward u0 m0 keep=all"
    at = page.read().on_gpu()
    assert (at.doing, at.index, at.instruction, at.beats) == (Activity.WORKS, 1, gpu.instruction, page.read().beats)
    stream.reached = 5
    gpu = until(page, 5)
    assert (gpu.doing, gpu.index, gpu.longest_s) == (Activity.WAITS, 2, 0.0)
    stream.reached = 10
    assert until(page, 10).doing is Activity.OTHER
    issue(heart, step=2)
    stream.reached = 14
    gpu = until(page, 14)
    assert (gpu.run, gpu.step, gpu.index) == (2, 2, 1)
    assert gpu.longest_s > 0, "it has been past this instruction before"
    assert len({id(event) for event in stream.recorded}) < len(stream.recorded), "events are used again"


def test_the_thread_that_asks_makes_the_gpu_its_own_first(rank):
    page, heart, stream = rank
    issue(heart)
    stream.reached = 1
    until(page, 1)
    assert stream.threads == ["superstep-ticker"], "once, in the thread that asks"


def test_a_gpu_that_has_failed_hides_no_error_and_ends_no_thread(rank):
    page, heart, stream = rank
    issue(heart)
    stream.reached = 2
    until(page, 2)
    stream.has_failed = True
    issue(heart, step=2)
    ticks, until_s = page.read().ticks, time.monotonic() + DEADLINE_S
    while page.read().ticks <= ticks + 1:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert page.read().gpu.passed == 2


def test_who_looks_from_outside_is_told_where_the_gpu_is(rank):
    page, heart, stream = rank
    issue(heart)
    stream.reached = 4
    until(page, 4)
    looker = RankInspector({0: page.view})
    (seen,) = looker.look()
    assert (seen.is_on_gpu, seen.doing, seen.what) == (True, "works", "forward u0 m0 keep=all")
    stream.reached = 5
    until(page, 5)
    (seen,) = looker.look()
    assert (seen.has_moved, seen.doing) == (True, "waits")


def test_a_first_backward_of_90_s_ends_no_run(rank):
    """Its host sleeps, as it does while autograd's thread has kernels compiled; the other rank's GPU waits for it."""
    page, heart, stream = rank
    heart.begin(PROGRAM, step=1)
    for index in range(3):
        heart.waits(index)
        heart.works(index)
    stream.reached = 6
    until(page, 6)
    slow = page.read()
    assert slow.on_gpu().instruction == "backward u0 m0"
    beats = {1: slow, 2: replace(slow, gpu=replace(slow.gpu, doing=Activity.WAITS))}
    now_s = [0.0]
    watcher = HangDetector(lambda: now_s[0], lambda process, number: Thread("S", 100))

    def look_for(seconds):
        for _ in range(int(seconds / LOOK_S)):
            now_s[0] += LOOK_S
            if (found := watcher.look(beats)) is not None:
                return found.process
        return None

    assert look_for(90) is None
    assert look_for(hang_rules.GPU_FIRST_S) == 1, "but not for ever"
