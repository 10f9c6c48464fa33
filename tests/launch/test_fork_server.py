"""The seed as a fork of a command that has imported torch, and of one that has computed already."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util

import pytest
import torch  # noqa: F401 - as this process has

from superstep.errors import Fault
from superstep.launch import fork_server

pytestmark = pytest.mark.multiproc

HEAD = """
import json, os, signal, sys
from pathlib import Path

import psutil

from superstep.launch import fork_server


def what_is_here(world):
    import torch.distributed as dist
    files = {number: os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if number > "2"
             and os.path.exists(f"/proc/self/fd/{number}")}
    print(f"rank {world.rank}")
    return {
        "seed": psutil.Process().ppid(),
        "files": [name for name in files.values() if name.endswith("held")],
        "signals": [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)],
        "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "stdin": os.readlink("/proc/self/fd/0"),
        "sum": float(dist.group.WORLD.size()),
    }
"""

BODY = """
if __name__ == "__main__":
    held = open(sys.argv[1] + "/held", "w")
    for number in (signal.SIGTERM, signal.SIGHUP):  # nohup would have a rank ignore the second one
        signal.signal(number, lambda *_: None)
    print("said once")  # into a buffer, for there is no terminal
    fork_server.begin("json")
    before = set(sys.modules)
    from superstep.launch.ranks import launch_on
    found = launch_on("cpu", 2, what_is_here)
    found["is_fork"] = psutil.Process(found["seed"]).cmdline() == psutil.Process().cmdline()
    found["torch_again"] = "torch" not in before
    Path(sys.argv[1], "found").write_text(json.dumps(found))
"""


class Dies:
    """Starts nothing, so many times."""

    def __init__(self, times):
        self.times, self.asked = times, 0

    def Process(self, target):  # noqa: N802 - as a context of multiprocessing has it
        return self

    def start(self):
        self.asked += 1
        if self.asked <= self.times:
            raise EOFError

    def join(self):
        pass


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_seed_that_dies_while_it_is_asked_is_followed_by_another(monkeypatch, times):
    context = Dies(times)
    monkeypatch.setattr(fork_server, "fork_context", lambda modules: context)
    monkeypatch.setattr(fork_server, "supports_fork_server", lambda: True)
    if times < fork_server.SEEDS:
        assert fork_server.context_of(ran) is context
        return
    with pytest.raises(Fault, match="the process that ranks are forked from has died"):
        fork_server.context_of(ran)


def ran(folder, body):
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    theirs = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=theirs, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found").read_text()), done


def test_a_command_that_has_not_computed_imports_torch_for_all(short_folder):
    found, done = ran(short_folder, BODY)
    assert found["is_fork"]
    assert not found["torch_again"]
    # Nothing of the command's is a rank's: no file, no handler of a signal, no word that waited in a buffer.
    assert found["files"] == []
    assert found["signals"] == [True, True]
    assert found["masked"] == []
    assert found["stdin"] == "/dev/null"
    assert sorted(done.stdout.split("\n")) == ["", "rank 0", "rank 1", "said once"]
    assert found["sum"] == 2


@pytest.fixture
def begun(monkeypatch):
    """Whether each seed that is begun would be a fork."""
    found = []
    monkeypatch.setattr(
        fork_server, "fork_context", lambda modules: found.append(util.spawnv_passfds is fork_server._fork)
    )
    monkeypatch.setattr(fork_server, "supports_fork_server", lambda: True)
    return found


def test_one_that_may_have_computed_is_not_forked(begun, monkeypatch):
    assert "torch" in sys.modules
    fork_server.begin("json")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(fork_server, "IMPORTED", ())
    over = threading.Event()
    beside = threading.Thread(target=over.wait)
    beside.start()
    fork_server.begin("json")
    over.set()
    beside.join()
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a worker of this suite has threads of its own
    fork_server.begin("json")
    assert begun == [False, False, True]
    assert util.spawnv_passfds is not fork_server._fork


def test_threads_that_start_processes_at_once_leave_stderr_where_it_is():
    before = os.fstat(2).st_ino
    together = threading.Barrier(4)

    def start():
        for _ in range(50):
            together.wait()
            with fork_server.stderr_away():
                time.sleep(0)

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(start) for _ in range(4)]:
            each.result()
    assert os.fstat(2).st_ino == before
