"""Stacks: where every thread of a rank is in Python's code, asked for from outside by a signal.

The handler is C (``faulthandler``): it answers while the rank waits within a call, sleeps, or has Python's lock kept by
code in C. What it says goes to memory of the rank's that has the form of a file.
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
from superstep.monitor.rank_inspector import last_seen
from superstep.monitor.status_page import Beats, Heart, Unwatched, page
from superstep.observe.doctor.failure_file import write_box

PATIENCE_S = 0.5
"""How long an answer is waited for."""

POLL_S = 0.01
MOST_BYTES = 2**20

SPY_S = 2.0
"""How long py-spy may take."""

_SPIED = re.compile(r"^    (\S+) \((.+):(\d+)\)$", re.MULTILINE)
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*:")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def answering(heart: Heart) -> Heart:
    """The heart of a process that says its stacks, from here on, whenever it is asked."""
    _answer(heart)
    return heart


def _answer(heart: Heart) -> int:
    """Have this process answer; the descriptor that its stacks go to."""
    with contextlib.suppress(ValueError):  # what is asked too late is passed over; only the main thread can say so
        signal.signal(_signal(), signal.SIG_IGN)
    handle = os.memfd_create("superstep-stacks")
    fcntl.fcntl(handle, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(_signal(), file=handle, all_threads=True)
    heart.listens(handle)
    return handle


@contextlib.contextmanager
def own_heart(rank: int, device: Device) -> Iterator[Beats]:
    """The heart of a rank that nobody has launched: its page is its own."""
    made = page(f":{rank}")
    if made is None:
        yield Unwatched()
        return
    heart = Heart(os.dup(made.handle), marks=device.stream_marks())
    handle = _answer(heart)
    try:
        yield heart
    except Fault as fault:
        fault.said = write_box(str(fault), [last_seen(made.view, rank)])
        raise
    finally:
        heart.listens(0)
        faulthandler.unregister(_signal())
        os.close(handle)
        heart.stop()
        made.close()


def ask(ranks: Mapping[int, int], proc: Path = Path("/proc")) -> dict[int, str]:
    """What processes say of their stacks, as ``faulthandler`` has it; nothing of one that does not answer.

    Args:
        ranks: processes, and the descriptor of each that its stacks go to, as it has told in its page.
        proc: of the system.
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
    """What py-spy says of the stacks of a process that does not answer, because it is stopped, say; empty where it may
    not look. It is given the form that ``faulthandler`` has.

    Args:
        spy: the path of the command.
        process: to be looked at, without being stopped.
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
    """Each thread's calls, ``file:line in function``, the innermost first; the main thread, which is last, first."""
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
