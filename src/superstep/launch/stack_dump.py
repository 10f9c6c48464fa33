"""Stack dumps: the Python stacks of a rank's threads, requested from outside by a signal.

The handler is C (``faulthandler``): it works while the rank waits in a call, sleeps, or C code holds the GIL. It
writes into a memory file of the rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from superstep.comm.device import Device
from superstep.errors import Fault
from superstep.monitor.rank_inspector import read_last_observation
from superstep.monitor.status_page import HeartbeatReceiver, HeartbeatWriter, NoHeartbeats, page
from superstep.observe.doctor.failure_file import write_box

PATIENCE_S = 0.5
"""Seconds to wait for an answer."""

POLL_S = 0.01
MOST_BYTES = 2**20

SPY_S = 2.0
"""Seconds for py-spy."""

_SPIED = re.compile(r"^    (\S+) \((.+):(\d+)\)$", re.MULTILINE)
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*:")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def answering(heart: HeartbeatWriter) -> HeartbeatWriter:
    """Make this process dump its stacks on request."""
    _answer(heart)
    return heart


def _answer(heart: HeartbeatWriter) -> int:
    """Install the handler; returns the descriptor of its output."""
    with contextlib.suppress(ValueError):  # what is asked too late is passed over; only the main thread can say so
        signal.signal(_signal(), signal.SIG_IGN)
    handle = os.memfd_create("superstep-stacks")
    fcntl.fcntl(handle, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(_signal(), file=handle, all_threads=True)
    heart.listens(handle)
    return handle


@contextlib.contextmanager
def own_heart(rank: int, device: Device) -> Iterator[HeartbeatReceiver]:
    """The status page of a rank without a launcher."""
    made = page(f":{rank}")
    if made is None:
        yield NoHeartbeats()
        return
    heart = HeartbeatWriter(os.dup(made.handle), marks=device.stream_marks())
    handle = _answer(heart)
    try:
        yield heart
    except Fault as fault:
        fault.record = write_box(str(fault), [read_last_observation(made.view, rank)])
        raise
    finally:
        heart.listens(0)
        faulthandler.unregister(_signal())
        os.close(handle)
        heart.stop()
        made.close()


def ask(ranks: Mapping[int, int], proc: Path = Path("/proc")) -> dict[int, str]:
    """Stacks of processes in ``faulthandler``'s form; without those that do not answer. ``ranks``: process ids, and the
    descriptor of each one's output, from its page.
    """
    places = {process: proc / str(process) / "fd" / str(handle) for process, handle in ranks.items() if handle}
    processes = []
    for process, place in places.items():
        with contextlib.suppress(OSError):
            os.truncate(place, 0)
            os.kill(process, _signal())
            processes.append(process)
    stacks: dict[int, str] = {}
    deadline_s = time.monotonic() + PATIENCE_S
    while processes and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        for process in list(processes):
            now = _text(places[process])
            if now and now == stacks.get(process):
                processes.remove(process)
            stacks[process] = now
    return stacks


def ask_spy(spy: str, process: int) -> str:
    """py-spy's stacks of a process that does not answer, in ``faulthandler``'s form; empty without permission.

    Args:
        spy: the path of the command.
        process: to look at, without stopping it.
    """
    command = [spy, "dump", "--nonblocking", "--pid", str(process)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    threads = re.split(r"^Thread .*$", done.stdout, flags=re.MULTILINE)[1:]
    calls = [[f'  File "{f[2]}", line {f[3]} in {f[1]}' for f in _SPIED.finditer(each)] for each in threads]
    # Its main thread comes first, and the one of faulthandler last.
    return "\n".join("\n".join(["Thread 0x0 (most recent call first):", *each]) for each in reversed(calls))


def threads_of(text: str) -> tuple[tuple[str, ...], ...]:
    """Each thread's calls, ``file:line in function``, innermost first; the main thread, which is last, comes first."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif (frame := _FRAME.match(line)) and threads:
            threads[-1].append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    return tuple(tuple(each) for each in reversed(threads))


def _text(place: Path) -> str:
    with contextlib.suppress(OSError), place.open("rb") as file:
        return file.read(MOST_BYTES).decode(errors="replace")
    return ""


def _signal() -> int:
    assert sys.platform == "linux"  # a page has said that there is somebody to ask
    return signal.SIGRTMIN + 3
