"""A process that is asked in lines: whoever asks it, or ends it, is done in bounded time, whatever it does."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from superstep.grade.config import GradeConfig
from superstep.grade.sandbox import cgroup
from superstep.grade.sandbox.cgroup import V2, CgroupParent, remove_left_groups
from superstep.grade.task import answer_rollout
from superstep.grade.workers.pool import Pool
from superstep.launch import line_process
from superstep.launch.line_process import LineProcess

TASKS = Path(__file__).with_name("trying_tasks.py")
LEAVES = """
import os, time
if os.fork():
    {then}
else:
    {apart}
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
"""A process with a child that holds its pipes, and says which number the child has."""


def left(*, then, apart="pass"):
    """Such a process, and its child."""
    made = LineProcess([sys.executable, "-c", LEAVES.format(then=then, apart=apart)], is_heard=False)
    return made, int(made._child.stdout.readline())


def is_over(thread):
    thread.join(30)
    return not thread.is_alive()


def has_gone(pid):
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_who_asks_a_process_that_is_killed_is_told_so_though_its_pipes_are_held_open():
    process, child = left(then="time.sleep(600)", apart="os.setsid()")
    told = []
    asks = threading.Thread(target=lambda: told.append(process.ask({}, 600.0)), daemon=True)
    asks.start()
    try:
        while process._deadline is None:
            time.sleep(0.01)
        process.kill()
        assert is_over(asks)
        assert told == [None]
    finally:
        os.kill(child, 9)
        process.end()


def test_what_a_process_has_left_in_its_session_is_ended_with_it():
    process, child = left(then="os._exit(0)")
    while process.is_there:
        time.sleep(0.01)
    process.end()
    assert has_gone(child)
    assert not process.is_there


def test_processes_that_the_kernel_does_not_end_are_waited_for_together_and_not_for_ever(monkeypatch):
    """As one does that hangs in the kernel: no signal is sent, and none that is sent would end it."""
    monkeypatch.setattr(line_process, "GONE_S", 1.5)
    pool = Pool(TASKS, GradeConfig(sandbox="none", workers=3, timeout_s=2, grader_timeout_s=600))
    with monkeypatch.context() as patched:
        for name in ("kill", "killpg"):
            patched.setattr(os, name, lambda process, number: None)
        asked = [pool.submit(0, 0, answer_rollout("sleep")) for _ in range(2)]
        while any(worker._process is None or worker._process._deadline is None for worker in pool._all[1:]):
            time.sleep(0.01)
        waited, wait = [], subprocess.Popen.wait
        patched.setattr(
            subprocess.Popen, "wait", lambda child, left_s=None: waited.append(left_s) or wait(child, left_s)
        )
        processes = [worker._process for worker in pool._all if worker._process is not None]
        closes = threading.Thread(target=pool.close, daemon=True)
        closes.start()
        is_closed = is_over(closes)
    for process in processes:
        # One that was asked nothing ends by itself when its input is closed.
        if process.is_there:
            os.killpg(process.pid, 9)
    assert is_closed
    assert [future.result().kind for future in asked] == ["grader_error"] * 2
    assert len(waited) >= 2
    assert all(left_s <= 1.5 for left_s in waited), "all were killed at the same time"


@pytest.mark.skipif(not hasattr(fcntl, "flock"), reason="needs flock")
def test_groups_that_another_process_holds_are_not_waited_for_for_ever(tmp_path, monkeypatch):
    (tmp_path / f"{cgroup.PREFIX}1").mkdir()
    monkeypatch.setattr(cgroup, "find_place", lambda: CgroupParent((tmp_path,), V2))
    monkeypatch.setattr(cgroup, "GONE_S", 0.1)
    held = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    removes = threading.Thread(target=remove_left_groups, daemon=True)
    removes.start()
    assert is_over(removes)
    assert list(tmp_path.iterdir()) != []
    os.close(held)
    remove_left_groups()
    assert list(tmp_path.iterdir()) == []
