"""Which processes are stopped: the system knows, and a slow one is none of them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from superstep.monitor import stopped_process
from superstep.monitor.stopped_process import LOOK_S, STOPPED_S, ProcessWatch, is_stopped

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


@pytest.fixture
def busy():
    """A process that computes for ever."""
    with subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) as process:
        yield process
        process.kill()


class Looks:
    """A pulse and its clock, which goes on by one look at a time."""

    def __init__(self):
        self.now_s = 0.0
        self.pulse = ProcessWatch(lambda: self.now_s)

    def __call__(self, processes, passed_s=LOOK_S):
        self.now_s += passed_s
        return self.pulse.look(processes)


def stop(process):
    process.send_signal(signal.SIGSTOP)
    while not is_stopped(process.pid):
        time.sleep(0.01)


def test_a_stopped_process_is_named_and_a_busy_one_is_not(busy):
    look = Looks()
    us = os.getpid()
    assert [look([us, busy.pid]) for _ in range(20)] == [None] * 20
    stop(busy)
    found = [look([us, busy.pid]) for _ in range(4)]
    assert found == [None] * round(STOPPED_S / LOOK_S) + [busy.pid]
    busy.send_signal(signal.SIGCONT)
    while is_stopped(busy.pid):
        time.sleep(0.01)
    assert look([us, busy.pid]) is None
    assert look([us, 2**22 + 1]) is None  # there is no such process


def test_who_was_stopped_with_the_others_takes_none_of_them_for_stopped(monkeypatch):
    """Ctrl-Z stops a whole terminal's processes, for a night say; ``fg`` reaches this one first."""
    state = dict.fromkeys((1, 2), True)
    monkeypatch.setattr(stopped_process, "is_stopped", state.get)
    look = Looks()
    assert look([1, 2]) is None
    assert look([1, 2], passed_s=3600.0) is None
    state.update({1: False, 2: False})
    assert look([1, 2]) is None
    state.update({2: True})  # what was before it went on is over
    assert [look([1, 2]) for _ in range(3)] == [None] * 3
    assert look([1, 2]) == 2


def test_a_process_is_found_whatever_its_name(tmp_path):
    odd = tmp_path / "a) T (b"
    odd.symlink_to(sys.executable)
    with subprocess.Popen([str(odd), "-Sc", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        stop(process)
        process.kill()
