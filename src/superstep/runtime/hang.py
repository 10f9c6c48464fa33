"""hang: which of some ranks that stand still is the one that hangs, and not merely slow.

A rank that waits for another does what it should; one that is slow goes on in the end. What tells the one that hangs:

    no beat of it          and none of any other rank of its world for STANDS_S: all that can go on has
    held                   its ticker is woken hundreds of times a second and does not get Python's lock: some code in C
                           keeps it. A thread that is short of a processor is not woken, and is not counted.
    still                  Python runs, but the thread that should compute sleeps, and does not wait for a rank; all
                           others wait for one, or sleep as well: what they do may be within what it computes
    busy                   it computes, and does not come to an end: what counts is the processor's time

Each has a limit: a floor, or a multiple of what the same instruction has taken in this process, or of the predicted
step where it has not run before. While this process itself was not looking, no time passes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.runtime.heart import Beat, Doing
from superstep.runtime.proc import stat_in, status_in
from superstep.runtime.pulse import LOOK_S

STANDS_S = 1.0
"""How long no rank of a world has gone on before any of them may hang."""

HELD_S = 1.25
"""The lock kept within an instruction that has run before: named within three seconds together with two looks."""

HELD_ELSEWHERE_S = 2.0
"""The lock kept at another place, or in an instruction that runs for the first time."""

HELD_MOST_S = 10.0
"""Whatever pauses there were before."""

PAUSES = 3.0
"""How many times the longest pause seen in the last minutes a pause may take."""

WAKES_PER_S = 50.0
"""How often a thread that waits for Python's lock is woken at least; it asks again every 5 ms."""

STILL_S, STILL_TIMES = 4.0, 10.0
BUSY_S, BUSY_TIMES = 20.0, 20.0
IDLE_TIMES = 10.0
"""How much longer than busy a rank may be that neither sleeps all the time nor computes: it waits for a processor."""

FIRST_S, FIRST_TIMES = 60.0, 20.0
"""Floors, and multiples of what the instruction took before; the last for one that never ran, of the whole step."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread as the system sees it.

    Attributes:
        state: R runs or would like to, S and D sleep, T is stopped, t is held by a debugger.
        switches: how often it has left a processor.
        cpu_s: of it, all together.
    """

    state: str
    switches: int
    cpu_s: float = 0.0


def thread(process: int, number: int) -> Thread | None:
    """A thread of a process; None where it has gone."""
    place = Path(f"/proc/{process}/task/{number}")
    try:
        told, numbers = status_in(place), stat_in(place)
    except OSError:
        return None
    switches = int(told["voluntary_ctxt_switches"]) + int(told["nonvoluntary_ctxt_switches"])
    cpu_s = (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    return Thread(told["State"].split()[0], switches, cpu_s)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One rank, and for how long it has been so."""

    beat: Beat
    unmoved_s: float = 0.0
    held_s: float = 0.0
    quiet_s: float = 0.0
    cpu_s: float = 0.0
    main: Thread | None = None
    ticker: Thread | None = None


@dataclass(frozen=True, slots=True)
class Hung:
    """A rank that hangs.

    Attributes:
        process: its number.
        beat: where.
        why: in words, of it.
        others: processes that hang as it does: it may be one of them as well.
    """

    process: int
    beat: Beat
    why: str
    others: tuple[int, ...] = ()


class Watcher:
    """Looks at the ranks of one world again and again."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[int, int], Thread | None] = thread,
    ) -> None:
        self._clock, self._threads = clock, threads
        self._looked_s = clock()
        self._seen: dict[int, _Seen] = {}

    def look(self, beats: Mapping[int, Beat]) -> Hung | None:
        """The rank that hangs, if any does; of each process that has not ended its beat."""
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_S), now_s
        self._seen = {process: self._after(process, beat, passed_s) for process, beat in beats.items()}
        if not self._seen or any(seen.unmoved_s < STANDS_S for seen in self._seen.values()):
            return None
        for why, hangs in (("held", _is_held), ("still", _is_still), ("busy", _is_busy)):
            found = [process for process, seen in self._seen.items() if hangs(seen)]
            rest = [seen for process, seen in self._seen.items() if process not in found]
            if found and (why != "still" or all(seen.beat.doing is Doing.WAITS for seen in rest)):
                found.sort(key=lambda process: _progress(self._seen[process].beat))
                return self._named(why, found)
        return None

    def _after(self, process: int, beat: Beat, passed_s: float) -> _Seen:
        before = self._seen.get(process)
        if before is None or beat.beats == 0 or beat.beats != before.beat.beats:
            return _Seen(beat)
        main = self._threads(process, process)
        ticker = self._threads(process, beat.ticker) if beat.ticker else None
        if main is None or main.state in "Tt":  # somebody has stopped it, or looks at it
            return _Seen(beat)
        found = replace(before, beat=beat, unmoved_s=before.unmoved_s + passed_s, main=main, ticker=ticker)
        sleeps = main.state in "SD" and before.main is not None and main.switches == before.main.switches
        spent_s = 0.0 if before.main is None else max(0.0, main.cpu_s - before.main.cpu_s)
        found = replace(found, quiet_s=before.quiet_s + passed_s if sleeps else 0.0, cpu_s=before.cpu_s + spent_s)
        if beat.ticks != before.beat.ticks:
            return replace(found, held_s=0.0)
        woken = 0 if ticker is None or before.ticker is None else ticker.switches - before.ticker.switches
        return replace(found, held_s=before.held_s + (passed_s if woken >= WAKES_PER_S * passed_s else 0.0))

    def _named(self, why: str, found: list[int]) -> Hung:
        seen, others = self._seen[found[0]], tuple(found[1:])
        words = {
            "held": f"it has kept Python's lock for {seen.held_s:.1f} s and more, in code that is not Python",
            "still": f"it has slept for {seen.quiet_s:.1f} s and more, and waits for no rank that is known",
            "busy": f"it has been at this for {seen.unmoved_s:.1f} s, and {seen.beat.longest_s:.2f} s at most before",
        }
        alike = [p for p in others if why != "held" and _progress(self._seen[p].beat) == _progress(seen.beat)]
        return Hung(found[0], seen.beat, words[why], tuple(alike))


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.step, beat.index


def _is_held(seen: _Seen) -> bool:
    beat = seen.beat
    is_known = beat.doing is not Doing.OTHER and beat.longest_s > 0.0
    floor_s = HELD_S if is_known else HELD_ELSEWHERE_S
    return seen.held_s >= max(floor_s, min(HELD_MOST_S, PAUSES * beat.pause_s))


def _is_still(seen: _Seen) -> bool:
    return seen.beat.doing is Doing.WORKS and seen.quiet_s >= _limit_s(seen.beat, STILL_S, STILL_TIMES)


def _is_busy(seen: _Seen) -> bool:
    limit_s = _limit_s(seen.beat, BUSY_S, BUSY_TIMES)
    return seen.beat.doing is Doing.WORKS and (seen.cpu_s >= limit_s or seen.unmoved_s >= IDLE_TIMES * limit_s)


def _limit_s(beat: Beat, floor_s: float, times: float) -> float:
    if beat.longest_s > 0.0:
        return max(floor_s, times * beat.longest_s)
    return max(FIRST_S, FIRST_TIMES * beat.expected_s)
