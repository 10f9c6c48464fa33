"""Looks at ranks from outside: each one's status page, and what the system reports of its process.

A page has no file, but a process that keeps it open shows it in /proc. So whoever may see the process can read the
page, even while the launcher is stopped.

    /proc/LAUNCHER/fd/7 -> /memfd:superstep-heart:PARTY:RANK
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from superstep.monitor.activity import Activity
from superstep.monitor.flight_recorder import BYTES, RecordedLines, notes_in
from superstep.monitor.hang_detector import WAKES_PER_S, Process, Thread, process_of, thread
from superstep.monitor.hang_rules import gil_held_s
from superstep.monitor.memory_history import sizes_in
from superstep.monitor.procfs import stat_in, status_in
from superstep.monitor.status_page import NAME, Heartbeat, read_beat
from superstep.observe.doctor.observations import Doing as Does
from superstep.observe.doctor.observations import RankObservation
from superstep.program.instructions import Instruction
from superstep.program.text import read_instruction

MOVES_S, MOVES_TIMES = 0.5, 3.0
"""A rank makes progress if its last one is at most this old, or this many times its instruction's earlier time."""

HELD_S = 0.75
"""Seconds for which a ticker that wakes up must lack the GIL, counted by ``gil_held_s``."""

_DOES: Mapping[Activity, Does] = {Activity.OTHER: "apart", Activity.WAITS: "waits", Activity.WORKS: "works"}


@dataclass(frozen=True, slots=True)
class Vitals:
    """A process as the system reports it.

    Attributes:
        state: of its main thread; empty where it has gone.
        resident_bytes: in memory.
        swapped_bytes: swapped to disk.
        major_faults: how often it waited for the disk because of a page.
        ran_ns: its main thread's time on a processor.
        queued_ns: its main thread's time waiting for one.
    """

    state: str = ""
    resident_bytes: int = 0
    swapped_bytes: int = 0
    major_faults: int = 0
    ran_ns: int = 0
    queued_ns: int = 0


def vitals(process: int, proc: Path = Path("/proc")) -> Vitals:
    place = proc / str(process)
    try:
        status, numbers = status_in(place), stat_in(place)
    except OSError:
        return Vitals()
    kib = {name: int(status.get(name, "0").split()[0]) for name in ("VmRSS", "VmSwap")}
    ran_ns = queued_ns = 0
    with suppress(OSError, ValueError):  # not every system counts that
        ran_ns, queued_ns, _ = map(int, (place / "schedstat").read_text(encoding="ascii").split())
    sizes = 1024 * kib["VmRSS"], 1024 * kib["VmSwap"]
    return Vitals(numbers[0].decode(), *sizes, int(numbers[9]), ran_ns, queued_ns)


def views_of(process: int, party: str | None = None) -> dict[int, mmap.mmap]:
    """The pages that a process keeps open, by rank; empty where it has none or may not be seen.

    Args:
        process: the ranks' launcher, or a rank without one.
        party: the name of one of several worlds; None means the first.
    """
    views: dict[str, dict[int, mmap.mmap]] = {}
    with suppress(OSError):
        for place in sorted(Path(f"/proc/{process}/fd").iterdir(), key=lambda path: int(path.name)):
            with suppress(OSError, ValueError):
                named = re.fullmatch(rf"/memfd:{NAME}(.*):(\d+) \(deleted\)", os.readlink(place))
                if named is not None:
                    with place.open("rb") as file:
                        view = mmap.mmap(file.fileno(), BYTES, access=mmap.ACCESS_READ)
                    its, rank = views.setdefault(named[1], {}), int(named[2])
                    # A process may still have the page of a run that was before.
                    if rank not in its or read_beat(view).since_ns >= read_beat(its[rank]).since_ns:
                        its[rank] = view
    return views.get(next(iter(views), "") if party is None else party, {})


@dataclass(frozen=True, slots=True)
class _First:
    """A rank at its first look, or at the first one without progress."""

    at_s: float
    beat: Heartbeat
    vitals: Vitals
    main: Thread | None
    ticker: Thread | None
    process: Process | None


class RankInspector:
    """Looks at ranks repeatedly; times count from the first look, or from the last progress.

    Args:
        views: each rank's page.
        clock: seconds, on the clock of the ranks' beats.
        threads: the system's report of a thread.
        system: the system's report of a process.
        processes: the same of all threads, given the ticker's id.
    """

    def __init__(
        self,
        views: Mapping[int, mmap.mmap],
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[int, int], Thread | None] = thread,
        system: Callable[[int], Vitals] = vitals,
        processes: Callable[[int, int], Process | None] = process_of,
    ) -> None:
        self._views, self._clock = views, clock
        self._threads, self._system, self._processes = threads, system, processes
        self._first: dict[int, _First] = {}
        self._stood: dict[int, _First] = {}

    def look(self) -> tuple[RankObservation, ...]:
        """Every rank now, without its notes."""
        return tuple(self._observe(rank, view) for rank, view in sorted(self._views.items()))

    def stacks(self) -> dict[int, int]:
        """The process of each rank, and the descriptor of its stack dumps."""
        beats = (read_beat(view) for view in self._views.values())
        return {beat.process: beat.stacks for beat in beats if beat.process}

    def _observe(self, rank: int, view: mmap.mmap) -> RankObservation:
        now_s, beat = self._clock(), read_beat(view).on_gpu()
        vitals_of_rank = self._system(beat.process) if beat.process else Vitals()
        main = self._threads(beat.process, beat.process) if beat.process else None
        ticker = self._threads(beat.process, beat.ticker) if beat.ticker else None
        whole = self._processes(beat.process, beat.ticker) if beat.ticker else None
        now = _First(now_s, beat, vitals_of_rank, main, ticker, whole)
        begin = self._first.setdefault(rank, now)
        # A rank may come to stand while it is looked at: how it does so is since it went on last.
        first = self._stood[rank] if rank in self._stood and self._stood[rank].beat.moves == beat.moves else now
        self._stood[rank] = first
        looked_s, since_s = now_s - first.at_s, max(0.0, now_s - beat.since_ns / 1e9) if beat.since_ns else 0.0
        slept = main is not None and first.main is not None and main.switches == first.main.switches
        cpu_s = main.cpu_s - first.main.cpu_s if main is not None and first.main is not None else 0.0
        ran_ns, queued_ns = (
            vitals_of_rank.ran_ns - begin.vitals.ran_ns,
            vitals_of_rank.queued_ns - begin.vitals.queued_ns,
        )
        faults = vitals_of_rank.major_faults - begin.vitals.major_faults
        return RankObservation(
            rank=rank,
            process=beat.process,
            state=vitals_of_rank.state,
            doing=_DOES[beat.doing],
            what=beat.instruction,
            run=beat.run,
            step=beat.step,
            index=beat.index,
            since_s=since_s,
            longest_s=beat.longest_s,
            has_moved=beat.moves != begin.beat.moves and since_s < max(MOVES_S, MOVES_TIMES * beat.longest_s),
            looked_s=looked_s,
            is_held=beat.ticks == first.beat.ticks and _held_s(first, now) >= HELD_S,
            is_on_gpu=beat.gpu is not None,
            is_asleep=slept and main is not None and main.state in "SD" and looked_s > 0,
            cpu_s=cpu_s,
            starved=queued_ns / (ran_ns + queued_ns) if queued_ns > 0 and ran_ns >= 0 else 0.0,
            memory=sizes_in(view),
            resident_bytes=vitals_of_rank.resident_bytes,
            swapped_bytes=vitals_of_rank.swapped_bytes,
            faults_per_s=faults / (now_s - begin.at_s) if now_s > begin.at_s else 0.0,
        )


def _held_s(first: _First, now: _First) -> float:
    """How long a ticker that did not tick lacked the GIL; 0.0 if the ticker did not wake up."""
    looked_s, before, after = now.at_s - first.at_s, first.process, now.process
    woken = 0 if now.ticker is None or first.ticker is None else now.ticker.switches - first.ticker.switches
    if woken < WAKES_PER_S * looked_s:
        return 0.0
    had_s = 0.0 if before is None or after is None else after.cpu_s - before.cpu_s
    return gil_held_s(looked_s, had_s, is_ready=after is None or after.is_ready)


def with_notes(rank: RankObservation, view: mmap.mmap) -> RankObservation:
    """The rank with its last instructions and their list. A rank that raised an error has left its program: its last
    place in it counts.
    """
    words, beat = RecordedLines(view), read_beat(view).on_gpu()
    observed = replace(rank, notes=tuple(notes_in(view, words)), follows=_list(tuple(words.around(beat.line))))
    last = next((note for note in reversed(observed.notes) if note.index >= 0), None)
    if observed.doing != "apart" or last is None or last.is_done:
        return observed
    doing: Does = "works" if last.start_s else "waits"
    return replace(
        observed, doing=doing, has_raised=True, what=last.what, run=last.run, step=last.step, index=last.index
    )


def read_last_observation(view: mmap.mmap, rank: int) -> RankObservation:
    """A rank of a failed run."""
    return with_notes(RankInspector({rank: view}).look()[0], view)


@lru_cache(maxsize=8)
def _list(texts: tuple[str, ...]) -> tuple[Instruction, ...]:
    return tuple(read_instruction(text) for text in texts if text)
