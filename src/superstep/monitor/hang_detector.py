"""HangDetector: looks at the ranks of one world repeatedly; ``hang_rules`` decide which hangs.

Times are counted in looks, so time in which this process did not run does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from superstep.monitor.hang_rules import HungRank, StalledRank, gil_held_s, who_hangs
from superstep.monitor.procfs import stat_in, status_in
from superstep.monitor.status_page import Heartbeat
from superstep.monitor.stopped_process import LOOK_S

WAKES_PER_S = 50.0
"""A thread that waits for the GIL wakes up at least this often; it retries every 5 ms."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread as the system reports it.

    Attributes:
        state: R runs or is ready, S and D sleep, T is stopped, t is held by a debugger.
        switches: how often it has left a processor.
        cpu_s: its processor time.
    """

    state: str
    switches: int
    cpu_s: float = 0.0


def thread(process: int, number: int) -> Thread | None:
    """A thread of a process; None where it has gone."""
    place = Path(f"/proc/{process}/task/{number}")
    try:
        status, numbers = status_in(place), stat_in(place)
    except OSError:
        return None
    switches = int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
    return Thread(status["State"].split()[0], switches, _cpu_s(numbers))


@dataclass(frozen=True, slots=True)
class Process:
    """A process whose ticker does not tick, as the system reports it.

    Attributes:
        cpu_s: processor time of all its threads.
        is_ready: whether a thread besides the ticker runs or is ready to.
    """

    cpu_s: float
    is_ready: bool


def process_of(number: int, ticker: int) -> Process | None:
    """A process; None where it has gone."""
    place = Path(f"/proc/{number}")
    try:
        others = [task for task in (place / "task").iterdir() if task.name != str(ticker)]
        return Process(_cpu_s(stat_in(place)), any(_is_ready(task) for task in others))
    except OSError:
        return None


def _is_ready(task: Path) -> bool:
    try:
        return stat_in(task)[0] == b"R"
    except OSError:  # it has ended meanwhile
        return False


def _cpu_s(numbers: Sequence[bytes]) -> float:
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Look:
    """A rank, its threads and its process at the last look; the process only where its ticker did not tick."""

    standing: StalledRank
    main: Thread | None = None
    ticker: Thread | None = None
    process: Process | None = None


class HangDetector:
    """Looks at the ranks of one world.

    Args:
        clock: seconds.
        threads: the system's report of a thread.
        processes: the system's report of a process, given its ticker's id.
        is_whole: whether no rank of the world is on another host.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[int, int], Thread | None] = thread,
        processes: Callable[[int, int], Process | None] = process_of,
        *,
        is_whole: bool = True,
    ) -> None:
        self._clock, self._threads, self._processes, self._is_whole = clock, threads, processes, is_whole
        self._looked_s = clock()
        self._looks: dict[int, _Look] = {}

    def look(self, beats: Mapping[int, Heartbeat]) -> HungRank | None:
        """The rank that hangs, if any; ``beats`` are those of all processes that have not ended."""
        now_s = self._clock()
        since_s, self._looked_s = now_s - self._looked_s, now_s
        self._looks = {process: self._after(process, beat, since_s) for process, beat in beats.items()}
        standing = {process: look.standing for process, look in self._looks.items()}
        return who_hangs(standing, is_whole=self._is_whole)

    def _after(self, process: int, beat: Heartbeat, since_s: float) -> _Look:
        look, passed_s = self._looks.get(process), min(since_s, LOOK_S)
        if look is None or beat.beats == 0 or beat.moves != look.standing.beat.moves:
            return _Look(StalledRank(beat))
        main = self._threads(process, process)
        ticker = self._threads(process, beat.ticker) if beat.ticker else None
        if main is None or main.state in "Tt":  # somebody has stopped it, or looks at it
            return _Look(StalledRank(beat))
        before = look.standing
        sleeps = main.state in "SD" and look.main is not None and main.switches == look.main.switches
        spent_s = 0.0 if look.main is None else max(0.0, main.cpu_s - look.main.cpu_s)
        woken = 0 if ticker is None or look.ticker is None else ticker.switches - look.ticker.switches
        is_denied, ticks = woken >= WAKES_PER_S * since_s, beat.ticks != before.beat.ticks
        whole = None if ticks else self._processes(process, beat.ticker)
        had_s = 0.0 if whole is None or look.process is None else whole.cpu_s - look.process.cpu_s
        kept = gil_held_s(passed_s, had_s, is_ready=whole is None or whole.is_ready) if is_denied else 0.0
        standing = StalledRank(
            beat,
            unmoved_s=before.unmoved_s + passed_s,
            held_s=0.0 if ticks else before.held_s + kept,
            quiet_s=before.quiet_s + passed_s if sleeps else 0.0,
            cpu_s=before.cpu_s + spent_s,
        )
        return _Look(standing, main, ticker, whole)
