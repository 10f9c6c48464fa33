"""A rank's process as its launcher sees it: how it fares, why it is gone, and its end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from superstep.errors import Fault, Lost
from superstep.launch.failure import Trouble
from superstep.launch.process_handle import ProcessHandle
from superstep.monitor.activity import Doing
from superstep.monitor.hang_detector import HangDetector
from superstep.monitor.hang_rules import Hung
from superstep.monitor.rank_inspector import last_seen
from superstep.monitor.status_page import Beat, Page
from superstep.monitor.stopped_process import Pulse, is_stopped
from superstep.observe.doctor.failure_file import write_box

FATAL = "Fatal Python error: "
"""How faulthandler begins."""

END_S = 3.0
"""How long a rank may take to end when it is told to."""

GENTLE_S = 1.5
"""How long rank 0 may take of that where the launch has come to an end: it is to be told of within three seconds."""

END = signal.SIGUSR2
"""Tells a rank to end now; SIGTERM may ask it to come to an end of its own."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One of them.

    Attributes:
        party: the name of its world, where it has one.
        number: its rank.
        host: what its host is called.
        is_first: whether it may hold a terminal.
        process: that it is.
        pipe: by which it reports.
        stderr: the file of what it says there.
        page: where it tells what it does; None where the system has no such memory.
    """

    party: str
    number: int
    host: str
    is_first: bool
    process: ProcessHandle
    pipe: Connection
    stderr: Path
    page: Page | None

    def named(self, trouble: Trouble) -> Trouble:
        """The same with the party's name, where it has one and what is told is not the user's to mend."""
        if self.party and isinstance(trouble.error, Fault):
            return replace(trouble, error=trouble.error.of(self.party))
        return trouble

    def death(self) -> Trouble:
        """Why it ended without a report."""
        self.process.join(END_S)
        code = self.process.exit_status()
        if code is None:
            why = "its process has ended, and so has the one that ranks are forked from, which alone was told how."
            return self._trouble(Lost, why, order=1)
        if code < 0:
            why = f"the process was killed by {signal.Signals(-code).name}"
            why += ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        else:
            why = f"the process ended with exit status {code} before it could say why"
        if code > 0 and not self.stderr.exists():
            why += "; a script that launches ranks does so below if __name__ == '__main__'."
            return self._trouble(Fault, why, order=1)
        lines = self.stderr.read_text(encoding="utf-8", errors="replace").split("\n") if self.stderr.exists() else []
        last = last_line(lines)
        hint = f"; its last line was: {last}" if last and code != -signal.SIGKILL else "."
        return self._trouble(Lost if code < 0 else Fault, f"{why}{hint}", order=1)

    def stop(self) -> Trouble:
        """That it is stopped."""
        why = f"its process {self.process.pid} was stopped (SIGSTOP, or Ctrl-Z) and did not go on: all ranks are ended."
        return self._trouble(Lost, why, order=0)

    def hang(self, hung: Hung, others: Sequence[int]) -> Trouble:
        """That it hangs, or one of the ``others`` does."""
        maybe = f" (or rank {', '.join(map(str, others))}, which stands where it does)" if others else ""
        why = f"its process {self.process.pid} hangs{maybe}: {hung.why}, while no rank goes on; all ranks are ended."
        return self._trouble(Lost, why, order=0)

    def beat(self) -> Beat | None:
        """What it does, on a GPU what that does, once it has run a program."""
        beat = None if self.page is None else self.page.read().on_gpu()
        return beat if beat is not None and beat.beats else None

    def _trouble(self, kind: type[Fault], why: str, *, order: int) -> Trouble:
        beat, at_s = self.beat(), time.time()
        error = kind(why, rank=self.number)
        if beat is not None:
            at = beat.instruction if beat.doing is not Doing.OTHER else ""
            error = kind(why, rank=self.number, host=self.host, step=beat.step, instruction=at)
        if isinstance(error, Lost):
            error.at_s = at_s
        return Trouble(at_s=at_s, order=order, error=error)


class Attending:
    """Looks at ranks that have not reported: who is stopped, and who hangs.

    Args:
        clock: seconds.
        is_whole: whether they are all of their worlds, and none is another host's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_whole: bool = True) -> None:
        self._clock, self._is_whole = clock, is_whole
        self._pulse = Pulse(clock)
        self._watchers: dict[str, HangDetector] = {}

    def look(self, ranks: Sequence[RankProcess]) -> Trouble | None:
        """What is wrong with one of them, if anything is."""
        processes = {rank.process.pid: rank for rank in ranks}
        stopped = self._pulse.look(processes)
        if stopped is not None:
            rank = processes[stopped]
            return rank.named(rank.stop())
        for party in {rank.party for rank in ranks}:
            watcher = self._watchers.setdefault(party, HangDetector(self._clock, is_whole=self._is_whole))
            its = {pid: rank.page.read() for pid, rank in processes.items() if rank.page and rank.party == party}
            hung = watcher.look(its)
            if hung is not None:
                rank = processes[hung.process]
                others = [processes[other].number for other in hung.others]
                return rank.named(rank.hang(hung, others))
        return None


def last_line(lines: Sequence[str]) -> str:
    """What a process wrote last; where that are stacks by Python's faulthandler, what stood before them, and the line
    of the current thread that is not torch's.
    """
    fatal = next((at for at, line in enumerate(lines) if line.startswith(FATAL)), None)
    before = next((line.strip() for line in reversed(lines[:fatal]) if line.strip()), "")
    if fatal is None:
        return before
    stacks = lines[fatal:]
    begin = next((at for at, line in enumerate(stacks) if line.startswith("Current thread")), 0)
    files = (
        line.strip() for line in stacks[begin:] if line.startswith("  File ") and "/site-packages/torch/" not in line
    )
    return f"{before or stacks[0]} ({next(files, 'no line of Python')})"


def output_of(ranks: Sequence[RankProcess], fault: Fault) -> str:
    """What every rank did when one was found to have failed, as text. Of several parties, those of the failed one are
    meant; which that is only its name in the fault tells.
    """
    party = next((rank.party for rank in ranks if rank.party and fault.message.startswith(rank.party)), ranks[0].party)
    its = [rank for rank in ranks if rank.party == party and rank.page is not None]
    return write_box(str(fault), [last_seen(rank.page.view, rank.number) for rank in its if rank.page])


def end_all(ranks: Sequence[RankProcess]) -> None:
    """End what still runs: rank 0 gently, then not."""
    deadline_s = time.monotonic() + GENTLE_S
    for rank in ranks:
        if rank.is_first and rank.process.is_alive:
            rank.process.send(END)
            if is_stopped(rank.process.pid):
                rank.process.send(signal.SIGCONT)
        else:
            rank.process.send(signal.SIGKILL)
    for rank in ranks:
        rank.process.join(max(0.0, deadline_s - time.monotonic()))
        rank.process.send(signal.SIGKILL)
        rank.process.join()
        rank.process.close()
        rank.pipe.close()
        if rank.page is not None:
            rank.page.close()


def pass_on(ranks: Sequence[RankProcess]) -> None:
    """Ask each to come to an end of its own."""
    for rank in ranks:
        rank.process.send(signal.SIGTERM)
