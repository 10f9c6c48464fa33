"""The end of a process that the system does not let go."""

import multiprocessing
import signal
import time
from types import SimpleNamespace

import pytest

from superstep.launch import process_handle
from superstep.launch.process_handle import ProcessHandle
from superstep.monitor import procfs

pytestmark = pytest.mark.multiproc


@pytest.fixture
def sleeping():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    yield process
    process.kill()
    process.join()


def test_a_killed_process_is_waited_for(sleeping):
    handle = ProcessHandle(sleeping)
    assert handle.kill()
    assert handle.exit_status() == -signal.SIGKILL
    handle.close()


def test_one_that_the_system_holds_is_left_and_python_does_not_wait_for_it_at_its_end(sleeping, monkeypatch):
    handle = ProcessHandle(sleeping)
    monkeypatch.setattr(process_handle, "LOOK_S", 0.01)
    monkeypatch.setattr(process_handle, "HELD_S", 0.1)
    monkeypatch.setattr(handle, "send", lambda number: None)
    looks = iter([True, False])  # it got on in between: what it was held for before does not count
    monkeypatch.setattr(process_handle, "is_held", lambda pid: next(looks, True))
    assert not handle.kill()
    assert next(looks, None) is None
    assert sleeping.is_alive()
    assert sleeping not in multiprocessing.active_children()
    handle.close()


@pytest.mark.parametrize(
    ("states", "is_held"), [("D", True), ("ZD", True), ("Z", False), ("DS", False), ("R", False), ("", False)]
)
def test_a_process_is_held_where_one_of_its_threads_is_and_none_goes_on(states, is_held, monkeypatch):
    threads = SimpleNamespace(iterdir=lambda: iter(states))
    monkeypatch.setattr(procfs, "Path", lambda name: threads)
    monkeypatch.setattr(procfs, "stat_in", lambda thread: [thread.encode()])
    assert procfs.is_held(1) == is_held
