"""The rules that find the rank that hangs, from the ranks' states: a function without clocks.

A rank that waits for another works correctly, and a slow one makes progress in the end. On a CPU, where a rank's place
is its host's place, these signs decide:

    no progress            of any rank of its world for STANDS_S: all that can go on has done so
    held                   its ticker wakes hundreds of times a second and does not get Python's lock: C code holds it.
                           Where threads of the process are ready to run, the holder may lack a processor: then only
                           the processor time of the process counts (``kept_s``)
    still                  Python runs, but the main thread sleeps and does not wait for a rank; all others wait for
                           one, or sleep as well: what they do may be part of what it computes
    busy                   it computes without end: its processor time counts

Each sign has a limit: a floor, or a multiple of what the same instruction took before in this process, or of the
predicted step if it has not run before.

On a GPU processor time says nothing: a host sleeps while kernels are compiled, while autograd's thread launches, and
while the GPU's queue is full. There a rank's place is its GPU's progress (``monitor.gpu_progress``), and the time
counts in which no GPU and no host of the world made progress:

    a rank outside programs    no rank hangs: a batch or a checkpoint may take long, and the others wait for it
    a rank that works          the one farthest behind; where several are there, one of them
    all wait                   no rank is known to hang: a collective among them does not complete
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superstep.monitor.activity import Activity
from superstep.monitor.status_page import Heartbeat

STANDS_S = 1.0
"""Seconds without progress of any rank before one may hang."""

HELD_S = 1.25
"""The lock held within an instruction that ran before: reported within three seconds, with two looks."""

HELD_ELSEWHERE_S = 2.0
"""The lock held elsewhere, or in an instruction's first run."""

HELD_MOST_S = 10.0
"""The limit, whatever pauses there were before."""

PAUSES = 3.0
"""How many times longer than the longest pause of the last minutes a pause may be."""

STILL_S, STILL_TIMES = 4.0, 10.0
BUSY_S, BUSY_TIMES = 20.0, 20.0
IDLE_TIMES = 10.0
"""How much longer than a busy rank one may take that neither sleeps nor computes: it waits for a processor."""

FIRST_S, FIRST_TIMES = 60.0, 20.0
"""Floors, and multiples of the instruction's time before; for a first run, of the whole step."""

GPU_S, GPU_TIMES = 60.0, 20.0
"""The same on a GPU: a known instruction may compile a kernel for a new shape."""

GPU_FIRST_S = 300.0
"""For an instruction's first run, which compiles all of its kernels."""


@dataclass(frozen=True, slots=True)
class StalledRank:
    """A rank, and how long it has stood.

    Attributes:
        beat: from its page.
        unmoved_s: since the last progress of its host or GPU.
        held_s: how long its ticker could not get Python's lock, counted by ``kept_s``.
        quiet_s: how long its main thread was on no processor.
        cpu_s: its main thread's processor time since its last progress.
    """

    beat: Heartbeat
    unmoved_s: float = 0.0
    held_s: float = 0.0
    quiet_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that hangs.

    Attributes:
        process: its id.
        beat: where it hangs.
        why: in words.
        others: processes that may hang instead.
    """

    process: int
    beat: Heartbeat
    why: str
    others: tuple[int, ...] = ()


def kept_s(passed_s: float, cpu_s: float, *, is_ready: bool) -> float:
    """How long Python's lock counts as held, between two looks at a process whose ticker waits for it.

    Args:
        passed_s: time between the looks.
        cpu_s: processor time of all threads of the process in it.
        is_ready: whether a thread besides the ticker runs or is ready: it may hold the lock. Where all sleep, so does
        the holder, which then does not lack a processor.
    """
    return min(passed_s, cpu_s) if is_ready else passed_s


def who_hangs(ranks: Mapping[int, StalledRank], *, is_whole: bool = True) -> HungRank | None:
    """The rank that hangs, if any.

    Args:
        ranks: by process.
        is_whole: whether no rank of the world is on another host.
    """
    if not ranks or any(rank.unmoved_s < STANDS_S for rank in ranks.values()):
        return None
    if any(rank.beat.gpu is not None for rank in ranks.values()):
        return _on_gpus(ranks, is_whole=is_whole)
    return _on_cpus(ranks)


def _on_cpus(ranks: Mapping[int, StalledRank]) -> HungRank | None:
    for why, hangs in (("held", _is_held), ("still", _is_still), ("busy", _is_busy)):
        hung = [process for process, rank in ranks.items() if hangs(rank)]
        rest = [rank for process, rank in ranks.items() if process not in hung]
        if hung and (why != "still" or all(rank.beat.doing is Activity.WAITS for rank in rest)):
            return _name_hung(ranks, hung, why)
    return None


def _name_hung(ranks: Mapping[int, StalledRank], hung: list[int], why: str) -> HungRank:
    first, *others = sorted(hung, key=lambda process: _at(ranks[process]))
    rank = ranks[first]
    words = {
        "held": f"it has kept Python's lock for {rank.held_s:.1f} s and more, in code that is not Python",
        "still": f"it has slept for {rank.quiet_s:.1f} s and more, and waits for no rank that is known",
        "busy": f"it has been at this for {rank.unmoved_s:.1f} s, and {rank.beat.longest_s:.2f} s at most before",
    }
    alike = [process for process in others if why != "held" and _at(ranks[process]) == _at(rank)]
    return HungRank(first, rank.beat, words[why], tuple(alike))


def _at(rank: StalledRank) -> tuple[int, int]:
    return rank.beat.step, rank.beat.index


def _is_held(rank: StalledRank) -> bool:
    beat = rank.beat
    is_known = beat.doing is not Activity.OTHER and beat.longest_s > 0.0
    floor_s = HELD_S if is_known else HELD_ELSEWHERE_S
    return rank.held_s >= max(floor_s, min(HELD_MOST_S, PAUSES * beat.pause_s))


def _is_still(rank: StalledRank) -> bool:
    return rank.beat.doing is Activity.WORKS and rank.quiet_s >= _limit_s(rank.beat, STILL_S, STILL_TIMES, FIRST_S)


def _is_busy(rank: StalledRank) -> bool:
    limit_s = _limit_s(rank.beat, BUSY_S, BUSY_TIMES, FIRST_S)
    return rank.beat.doing is Activity.WORKS and (rank.cpu_s >= limit_s or rank.unmoved_s >= IDLE_TIMES * limit_s)


def _limit_s(beat: Heartbeat, floor_s: float, times: float, first_s: float) -> float:
    if beat.longest_s > 0.0:
        return max(floor_s, times * beat.longest_s)
    return max(first_s, FIRST_TIMES * beat.expected_s)


def _on_gpus(ranks: Mapping[int, StalledRank], *, is_whole: bool) -> HungRank | None:
    stands_s = min(rank.unmoved_s for rank in ranks.values())
    places = {process: _place(rank) for process, rank in ranks.items()}
    held = {process: place for process, place in places.items() if ranks[process].held_s >= STANDS_S}
    works = {process: place for process, place in places.items() if place.doing is Activity.WORKS}
    if not held and (not is_whole or any(place.doing is Activity.OTHER for place in places.values())):
        return None  # the others may wait for that one, or for one that is not seen, within what they work on
    suspects = held or works
    if not suspects or stands_s < max(_limit_s(p, GPU_S, GPU_TIMES, GPU_FIRST_S) for p in suspects.values()):
        return None
    first, *others = sorted(suspects, key=lambda process: (suspects[process].step, suspects[process].index))
    place = suspects[first]
    alike = [p for p in others if (suspects[p].step, suspects[p].index) == (place.step, place.index)]
    why = f"no host and no GPU has gone on for {stands_s:.0f} s, and it waits for no rank that is known"
    if held:
        why += "; it keeps Python's lock, in code that is not Python"
    elif (gpu := place.gpu) is not None and gpu.passed < gpu.issued:
        why += f"; its GPU has {gpu.issued - gpu.passed} more to do than this"
    return HungRank(first, place, why, tuple(alike))


def _place(rank: StalledRank) -> Heartbeat:
    """A rank's place: its GPU's, except where Python's lock is held, so that the GPU's is unknown."""
    return rank.beat if rank.held_s >= STANDS_S else rank.beat.on_gpu()
