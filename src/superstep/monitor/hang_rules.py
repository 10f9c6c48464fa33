"""hang_rules: from what is known of the ranks of a world to the one that hangs, a function without clocks.

A rank that waits for another does what it should; one that is slow goes on in the end. What tells the one that hangs on
a CPU, where a rank's place is its host's:

    no beat of it          and none of any other rank of its world for STANDS_S: all that can go on has
    held                   its ticker is woken hundreds of times a second and does not get Python's lock: some code in C
                           keeps it. Where threads of the process are ready to run, the one with the lock may be
                           short of a processor: then only as much counts as the process has had (``kept_s``)
    still                  Python runs, but the thread that should compute sleeps, and does not wait for a rank; all
                           others wait for one, or sleep as well: what they do may be within what it computes
    busy                   it computes, and does not come to an end: what counts is the processor's time

Each has a limit: a floor, or a multiple of what the same instruction has taken in this process, or of the predicted
step where it has not run before.

On a GPU the processor says nothing: a host sleeps while kernels are compiled, while autograd's thread launches, while
the GPU has more to do than may be queued. A rank's place is there how far its GPU has come (``monitor.gpu_progress``),
and what counts is how long no GPU and no host of the world has gone on:

    a rank beside programs     none hangs: a batch, a checkpoint may take long, and the others stand in what needs it
    a rank that works          the one that is farthest behind; where several stand there alike, one of them
    all wait                   none hangs that is known: a collective among them does not complete
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superstep.monitor.activity import Doing
from superstep.monitor.status_page import Beat

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

STILL_S, STILL_TIMES = 4.0, 10.0
BUSY_S, BUSY_TIMES = 20.0, 20.0
IDLE_TIMES = 10.0
"""How much longer than busy a rank may be that neither sleeps all the time nor computes: it waits for a processor."""

FIRST_S, FIRST_TIMES = 60.0, 20.0
"""Floors, and multiples of what the instruction took before; the last for one that never ran, of the whole step."""

GPU_S, GPU_TIMES = 60.0, 20.0
"""The same on a GPU: a kernel for a shape that is new is compiled in an instruction that has run before."""

GPU_FIRST_S = 300.0
"""Where the instruction has not run before: all of its kernels are compiled then."""


@dataclass(frozen=True, slots=True)
class RankStanding:
    """One rank, and for how long it has been so.

    Attributes:
        beat: what its page says.
        unmoved_s: since its host, or its GPU, went on last.
        held_s: that its ticker has been woken and did not get Python's lock, as ``kept_s`` counts it.
        quiet_s: that its main thread has been on no processor.
        cpu_s: that its main thread has had of a processor since it went on last.
    """

    beat: Beat
    unmoved_s: float = 0.0
    held_s: float = 0.0
    quiet_s: float = 0.0
    cpu_s: float = 0.0


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


def kept_s(passed_s: float, cpu_s: float, *, is_ready: bool) -> float:
    """For how long Python's lock counts as kept, of the time between two looks at a process whose ticker waits for it.

    Args:
        passed_s: between the looks.
        cpu_s: of processors that all threads of the process have had in it.
        is_ready: whether one of its threads, the ticker aside, runs or is ready to: that one may have the lock. Where
            all sleep, so does the one that has it, and lacks no processor.
    """
    return min(passed_s, cpu_s) if is_ready else passed_s


def who_hangs(ranks: Mapping[int, RankStanding], *, is_whole: bool = True) -> Hung | None:
    """The rank that hangs, if any does.

    Args:
        ranks: by process, all that are known of a world.
        is_whole: whether these are all of its world; those of other hosts are not known.
    """
    if not ranks or any(rank.unmoved_s < STANDS_S for rank in ranks.values()):
        return None
    if any(rank.beat.gpu is not None for rank in ranks.values()):
        return _on_gpus(ranks, is_whole=is_whole)
    return _on_cpus(ranks)


def _on_cpus(ranks: Mapping[int, RankStanding]) -> Hung | None:
    for why, hangs in (("held", _is_held), ("still", _is_still), ("busy", _is_busy)):
        hung = [process for process, rank in ranks.items() if hangs(rank)]
        rest = [rank for process, rank in ranks.items() if process not in hung]
        if hung and (why != "still" or all(rank.beat.doing is Doing.WAITS for rank in rest)):
            return _name_hung(ranks, hung, why)
    return None


def _name_hung(ranks: Mapping[int, RankStanding], hung: list[int], why: str) -> Hung:
    first, *others = sorted(hung, key=lambda process: _at(ranks[process]))
    rank = ranks[first]
    words = {
        "held": f"it has kept Python's lock for {rank.held_s:.1f} s and more, in code that is not Python",
        "still": f"it has slept for {rank.quiet_s:.1f} s and more, and waits for no rank that is known",
        "busy": f"it has been at this for {rank.unmoved_s:.1f} s, and {rank.beat.longest_s:.2f} s at most before",
    }
    alike = [process for process in others if why != "held" and _at(ranks[process]) == _at(rank)]
    return Hung(first, rank.beat, words[why], tuple(alike))


def _at(rank: RankStanding) -> tuple[int, int]:
    return rank.beat.step, rank.beat.index


def _is_held(rank: RankStanding) -> bool:
    beat = rank.beat
    is_known = beat.doing is not Doing.OTHER and beat.longest_s > 0.0
    floor_s = HELD_S if is_known else HELD_ELSEWHERE_S
    return rank.held_s >= max(floor_s, min(HELD_MOST_S, PAUSES * beat.pause_s))


def _is_still(rank: RankStanding) -> bool:
    return rank.beat.doing is Doing.WORKS and rank.quiet_s >= _limit_s(rank.beat, STILL_S, STILL_TIMES, FIRST_S)


def _is_busy(rank: RankStanding) -> bool:
    limit_s = _limit_s(rank.beat, BUSY_S, BUSY_TIMES, FIRST_S)
    return rank.beat.doing is Doing.WORKS and (rank.cpu_s >= limit_s or rank.unmoved_s >= IDLE_TIMES * limit_s)


def _limit_s(beat: Beat, floor_s: float, times: float, first_s: float) -> float:
    if beat.longest_s > 0.0:
        return max(floor_s, times * beat.longest_s)
    return max(first_s, FIRST_TIMES * beat.expected_s)


def _on_gpus(ranks: Mapping[int, RankStanding], *, is_whole: bool) -> Hung | None:
    stands_s = min(rank.unmoved_s for rank in ranks.values())
    places = {process: _place(rank) for process, rank in ranks.items()}
    held = {process: place for process, place in places.items() if ranks[process].held_s >= STANDS_S}
    works = {process: place for process, place in places.items() if place.doing is Doing.WORKS}
    if not held and (not is_whole or any(place.doing is Doing.OTHER for place in places.values())):
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
    return Hung(first, place, why, tuple(alike))


def _place(rank: RankStanding) -> Beat:
    """Where a rank is: how far its GPU has come, but where Python's lock is kept, and so nobody can say that."""
    return rank.beat if rank.held_s >= STANDS_S else rank.beat.on_gpu()
