"""RankProcess: a rank's process as its launcher sees it: its state, why it ended, and its end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from superstep.errors import Fault, RankLost
from superstep.launch.failure import RankFailure
from superstep.launch.process_handle import ProcessHandle
from superstep.monitor.activity import Activity
from superstep.monitor.hang_detector import HangDetector
from superstep.monitor.hang_rules import HungRank
from superstep.monitor.rank_inspector import read_last_observation
from superstep.monitor.status_page import Heartbeat, StatusPage
from superstep.monitor.stopped_process import ProcessWatch, is_stopped
from superstep.observe.doctor.failure_file import write_box

FATAL = "Fatal Python error: "
"""The start of faulthandler's message."""

END_S = 3.0
"""Seconds for a rank to end when told to."""

GENTLE_S = 1.5
"""Seconds of these for rank 0 at a launch's end, so that the end is reported within three seconds."""

END = signal.SIGUSR2
"""Tells a rank to end now; SIGTERM may only request a normal end."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process.

    Attributes:
        party: its world's name, if any.
        number: its rank.
        host: its host's name.
        is_first: whether it may use the terminal.
        pipe: carries its report.
        stderr: the file of its stderr.
        page: its status page; None where the system has no such memory.
    """

    party: str
    number: int
    host: str
    is_first: bool
    process: ProcessHandle
    pipe: Connection
    stderr: Path
    page: StatusPage | None

    def add_party(self, trouble: RankFailure) -> RankFailure:
        """Add the party's name, if any, unless the trouble is the user's mistake."""
        if self.party and isinstance(trouble.error, Fault):
            return replace(trouble, error=trouble.error.of(self.party))
        return trouble

    def death(self) -> RankFailure:
        """Why it ended without a report."""
        self.process.join(END_S)
        code = self.process.exit_status()
        if code is None:
            why = "its process has ended, and so has the one that ranks are forked from, which alone was told how."
            return self._trouble(RankLost, why, order=1)
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
        return self._trouble(RankLost if code < 0 else Fault, f"{why}{hint}", order=1)

    def stop(self) -> RankFailure:
        """The trouble of a stopped rank."""
        why = f"its process {self.process.pid} was stopped (SIGSTOP, or Ctrl-Z) and did not go on: all ranks are ended."
        return self._trouble(RankLost, why, order=0)

    def hang(self, hung: HungRank, others: Sequence[int]) -> RankFailure:
        """The trouble of a hanging rank: this one, or one of the ``others``."""
        maybe = f" (or rank {', '.join(map(str, others))}, which stands where it does)" if others else ""
        why = f"its process {self.process.pid} hangs{maybe}: {hung.why}, while no rank goes on; all ranks are ended."
        return self._trouble(RankLost, why, order=0)

    def beat(self) -> Heartbeat | None:
        """What it does now, and on a GPU how far that is; None before its first program."""
        beat = None if self.page is None else self.page.read().on_gpu()
        return beat if beat is not None and beat.beats else None

    def _trouble(self, kind: type[Fault], why: str, *, order: int) -> RankFailure:
        beat, at_s = self.beat(), time.time()
        error = kind(why, rank=self.number)
        if beat is not None:
            at = beat.instruction if beat.doing is not Activity.OTHER else ""
            error = kind(why, rank=self.number, host=self.host, step=beat.step, instruction=at)
        if isinstance(error, RankLost):
            error.at_s = at_s
        return RankFailure(at_s=at_s, order=order, error=error)


class RankWatch:
    """Watches ranks that have not reported: which is stopped, and which hangs.

    Args:
        clock: seconds.
        is_whole: whether no rank of their worlds is on another host.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_whole: bool = True) -> None:
        self._clock, self._is_whole = clock, is_whole
        self._pulse = ProcessWatch(clock)
        self._watchers: dict[str, HangDetector] = {}

    def look(self, ranks: Sequence[RankProcess]) -> RankFailure | None:
        """The trouble of one of the ranks, if any."""
        processes = {rank.process.pid: rank for rank in ranks}
        stopped = self._pulse.look(processes)
        if stopped is not None:
            rank = processes[stopped]
            return rank.add_party(rank.stop())
        for party in {rank.party for rank in ranks}:
            watcher = self._watchers.setdefault(party, HangDetector(self._clock, is_whole=self._is_whole))
            its = {pid: rank.page.read() for pid, rank in processes.items() if rank.page and rank.party == party}
            hung = watcher.look(its)
            if hung is not None:
                rank = processes[hung.process]
                others = [processes[other].number for other in hung.others]
                return rank.add_party(rank.hang(hung, others))
        return None


def last_line(lines: Sequence[str]) -> str:
    """The last line of a process. If it ends with faulthandler's stacks: the line before them, and the line of the
    current thread outside torch.
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
    """What every rank of the failed party did when the failure was found, as text; the fault names the party."""
    party = next((rank.party for rank in ranks if rank.party and fault.message.startswith(rank.party)), ranks[0].party)
    its = [rank for rank in ranks if rank.party == party and rank.page is not None]
    return write_box(str(fault), [read_last_observation(rank.page.view, rank.number) for rank in its if rank.page])


def end_all(ranks: Sequence[RankProcess]) -> None:
    """End the ranks that still run: rank 0 gently first, then by force. One that a hung mount holds is left to it."""
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
        rank.process.kill()
        rank.process.close()
        rank.pipe.close()
        if rank.page is not None:
            rank.page.close()


def pass_on(ranks: Sequence[RankProcess]) -> None:
    """Ask each rank for a normal end."""
    for rank in ranks:
        rank.process.send(signal.SIGTERM)
