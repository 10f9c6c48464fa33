"""The rules that find the rank that hangs, from the ranks' states: functions without clocks.

A rank that waits for another rank works correctly, and a slow rank makes progress in the end. A rank may hang only once
no rank of its world has made progress for ``UNMOVED_S``: then every rank that can go on has done so. On a CPU, the rank
that hangs then has one of these signs:

    held     Its ticker thread wakes up hundreds of times a second and does not get the GIL: C code holds it. If a
             thread of the process is ready to run, the holder may lack a processor: then only the processor time of
             the process counts (``gil_held_s``).
    still    Python runs, but the main thread sleeps, and not in a wait for a rank. All other ranks wait for a rank, or
             sleep as well: a rank that computes may be about to wake this one.
    busy     It computes without end: its processor time counts.

Each sign has a limit in seconds: the larger of a floor and a multiple of an expected time. That is the longest time of
the same instruction before in this process; for its first run, the predicted time of a step.

On a GPU processor time says nothing: a host sleeps while kernels are compiled, while autograd's thread launches, and
while the GPU's queue is full. There the GPU's progress decides (``monitor.gpu_progress``), once no GPU and no host of
the world has made progress for the limit:

    a rank is outside programs     No rank hangs: a batch or a checkpoint may take long, and the others wait for it.
    ranks work                     The one farthest behind hangs; if several are equally far, one of them.
    all ranks wait                 No rank is known to hang: a collective does not complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superstep.monitor.activity import Activity
from superstep.monitor.status_page import Heartbeat

UNMOVED_S = 1.0
"""Seconds without progress of any rank, before a rank may hang."""

HELD_S = 1.25
"""Seconds for which the GIL is held in an instruction that ran before: two looks report it within three seconds."""

HELD_ELSEWHERE_S = 2.0
"""The same elsewhere, or in the first run of an instruction."""

HELD_MOST_S = 10.0
"""The highest limit, however long the pauses were before."""

PAUSES = 3.0
"""A pause may be this many times as long as the longest one of the last minutes."""

STILL_S, STILL_TIMES = 4.0, 10.0
BUSY_S, BUSY_TIMES = 20.0, 20.0
IDLE_TIMES = 10.0
"""A rank that neither sleeps nor computes waits for a processor: its limit is this many times that of a busy rank."""

FIRST_S, FIRST_TIMES = 60.0, 20.0
"""For the first run of an instruction: the floor, and the multiple of the predicted step."""

GPU_S, GPU_TIMES = 60.0, 20.0
"""On a GPU: the floor and the multiple; a known instruction may compile a kernel for a new shape."""

GPU_FIRST_S = 300.0
"""On a GPU, the floor for an instruction's first run, which compiles all of its kernels."""


@dataclass(frozen=True, slots=True)
class StalledRank:
    """A rank, and how long it has made no progress.

    Attributes:
        beat: the heartbeat from its status page.
        unmoved_s: seconds since the last progress of its host or GPU.
        held_s: seconds for which its ticker did not get the GIL, counted by ``gil_held_s``.
        quiet_s: seconds for which its main thread ran on no processor.
        cpu_s: processor time of its main thread since the last progress.
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
        process: process id.
        beat: its heartbeat, which names the instruction.
        why: the reason, as text for the user.
        others: processes that may hang instead.
    """

    process: int
    beat: Heartbeat
    why: str
    others: tuple[int, ...] = ()


def gil_held_s(passed_s: float, cpu_s: float, *, is_ready: bool) -> float:
    """The seconds for which the GIL counts as held, between two looks at a process with a ticker that waits for it.

    Args:
        passed_s: time between the looks.
        cpu_s: processor time of all threads of the process in that time.
        is_ready: whether a thread besides the ticker runs or is ready to run. It may hold the GIL and lack a processor;
            if all threads sleep, the holder sleeps too, and lacks none.
    """
    return min(passed_s, cpu_s) if is_ready else passed_s


def who_hangs(ranks: Mapping[int, StalledRank], *, is_whole: bool = True) -> HungRank | None:
    """The rank that hangs, if any.

    Args:
        ranks: by process.
        is_whole: whether no rank of the world is on another host.
    """
    if not ranks or any(rank.unmoved_s < UNMOVED_S for rank in ranks.values()):
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
        "held": f"it has held the GIL for {rank.held_s:.1f} s or longer, in code that is not Python",
        "still": f"it has slept for {rank.quiet_s:.1f} s or longer, and waits for no known rank",
        "busy": f"it has computed for {rank.unmoved_s:.1f} s; the longest time before was {rank.beat.longest_s:.2f} s",
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
    still_s = min(rank.unmoved_s for rank in ranks.values())
    places = {process: _place(rank) for process, rank in ranks.items()}
    held = {process: place for process, place in places.items() if ranks[process].held_s >= UNMOVED_S}
    works = {process: place for process, place in places.items() if place.doing is Activity.WORKS}
    if not held and (not is_whole or any(place.doing is Activity.OTHER for place in places.values())):
        return None  # the ranks that work may in fact wait for that one, or for one on another host
    suspects = held or works
    if not suspects or still_s < max(_limit_s(p, GPU_S, GPU_TIMES, GPU_FIRST_S) for p in suspects.values()):
        return None
    first, *others = sorted(suspects, key=lambda process: (suspects[process].step, suspects[process].index))
    place = suspects[first]
    alike = [p for p in others if (suspects[p].step, suspects[p].index) == (place.step, place.index)]
    why = f"no host and no GPU has made progress for {still_s:.0f} s, and it waits for no known rank"
    if held:
        why += "; it holds the GIL, in code that is not Python"
    elif (gpu := place.gpu) is not None and gpu.passed < gpu.issued:
        why += f"; {gpu.issued - gpu.passed} more instructions wait in its GPU's queue"
    return HungRank(first, place, why, tuple(alike))


def _place(rank: StalledRank) -> Heartbeat:
    """The heartbeat with the GPU's place in the program; while the GIL is held, that is unknown: with the host's."""
    return rank.beat if rank.held_s >= UNMOVED_S else rank.beat.on_gpu()
