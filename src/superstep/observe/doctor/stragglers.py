"""Where each rank's time went in the last steps, and which rank is slower than its peers at the same work.

A step lasts from its program's begin to the next one's, so it includes the work in between: the wait for a batch, a
validation, a checkpoint, reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from superstep.observe.doctor.observations import Note, RankObservation, RunObservation

STEPS, WINDOW_S = 30, 3.0
"""Steps that are looked at, and seconds that they span at least: a moment on a busy machine says nothing."""

ENOUGH = 5
"""The least steps for a finding."""

SLOW = 1.3
"""How many times its peers' time makes a rank slow. The fastest tenth of its steps is compared with theirs, without
waits for a processor: other work on the machine slows some steps, not all.
"""


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """One rank's time by use, in seconds of all steps together.

    Attributes:
        steps: their number.
        work_s: on instructions.
        wait_s: for other ranks, within programs.
        beside_s: outside programs, by kind of work.
    """

    steps: int
    whole_s: float
    work_s: float
    wait_s: float
    beside_s: Mapping[str, float] = field(default_factory=dict)

    def share(self, what: str) -> float:
        """The share of time for one kind of work outside programs."""
        return self.beside_s.get(what, 0.0) / self.whole_s if self.whole_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slower than its peers.

    Attributes:
        times: how many times slower, over all its compute.
        what: the instruction that costs most of it.
        own_s: its time for that in one step.
        peers_s: the peers' median.
        steps: their number.
    """

    rank: int
    times: float
    what: str
    own_s: float
    peers_s: float
    steps: int


def steps_of(rank: RankObservation, length: int) -> dict[int, list[Note]]:
    """The notes of each complete run of the step's program, by run. ``length``: of the rank's list in it."""
    by_run = rank.group_done_by_run()
    # An evaluation has other instructions, and never the last one of a step.
    whole = {run: notes for run, notes in by_run.items() if len(notes) == length and notes[-1].what == "step"}
    runs = sorted(whole)
    first = max(0, len(runs) - STEPS)
    while first and whole[runs[-1]][0].ready_s - whole[runs[first]][0].ready_s < WINDOW_S:
        first -= 1
    return {run: whole[run] for run in runs[first:]}


def measure_spent(run: RunObservation) -> dict[int, TimeSpent]:
    """Of every rank with at least ``ENOUGH`` steps."""
    by_rank = {rank.rank: _time_spent(rank, _length(run, rank)) for rank in run.ranks}
    return {rank: each for rank, each in by_rank.items() if each is not None}


def _time_spent(rank: RankObservation, length: int) -> TimeSpent | None:
    steps = steps_of(rank, length)
    if len(steps) <= ENOUGH:
        return None
    starts = [notes[0].ready_s for notes in steps.values()]
    first_s, last_s = starts[0], starts[-1]
    within = [n for n in rank.notes if n.is_done and first_s <= n.ready_s < last_s]
    beside: dict[str, float] = {}
    for note in within:
        if note.index < 0:
            beside[note.what] = beside.get(note.what, 0.0) + note.end_s - note.ready_s
    programs = [note for note in within if note.index >= 0]
    work_s = sum(note.own_s for note in programs)
    all_s = sum(note.end_s - note.ready_s for note in programs)
    return TimeSpent(len(steps) - 1, last_s - first_s, work_s, max(0.0, all_s - work_s), beside)


def slowest(run: RunObservation) -> list[SlowRank]:
    """Ranks that take ``SLOW`` times as long as the ranks with the same list, the slowest first."""
    alike: dict[int, list[RankObservation]] = {}
    for rank in run.ranks:
        alike.setdefault(run.mesh.at(rank.rank).pp, []).append(rank)
    slow_ranks = [slow for peers in alike.values() if len(peers) > 1 for slow in _slow_of(run, peers)]
    return sorted(slow_ranks, key=lambda slow: -slow.times)


def _slow_of(run: RunObservation, ranks: Sequence[RankObservation]) -> list[SlowRank]:
    steps = {rank.rank: steps_of(rank, _length(run, rank)) for rank in ranks}
    common = sorted(set.intersection(*(set(each) for each in steps.values())))
    if len(common) < ENOUGH:
        return []
    runs = {rank.rank: 1.0 - rank.starved for rank in ranks}
    took = {rank: runs[rank] * _quick([sum(n.own_s for n in each[r]) for r in common]) for rank, each in steps.items()}
    slow_ranks = []
    # Where ranks wait for processors, what is left of the difference is the less certain.
    least = SLOW + max(rank.starved for rank in ranks)
    for rank, own_s in took.items():
        peers = [p for p in took if p != rank]
        peers_s = median(took[p] for p in peers)
        if peers_s > 0 and own_s >= least * peers_s:
            what, own, other = _costliest(steps, rank, peers, common)
            slow_ranks.append(SlowRank(rank, own_s / peers_s, what, own, other, len(common)))
    return slow_ranks


def _costliest(
    steps: Mapping[int, Mapping[int, Sequence[Note]]], rank: int, peers: Sequence[int], common: Sequence[int]
) -> tuple[str, float, float]:
    """The instruction where a rank loses most: its words, its seconds, and its peers' seconds."""
    length = len(steps[rank][common[0]])

    def own(who: int, at: int) -> float:
        return _quick([steps[who][run][at].own_s for run in common])

    each = [(own(rank, at), median(own(peer, at) for peer in peers), at) for at in range(length)]
    own_s, peers_s, at = max(each, key=lambda one: one[0] - one[1])
    return steps[rank][common[0]][at].what, own_s, peers_s


def step_s(run: RunObservation) -> float:
    """The median time from one step's begin to the next, on any rank; 0.0 if unknown."""
    lengths = [
        later[0].ready_s - notes[0].ready_s
        for rank in run.ranks
        for notes, later in pairwise(steps_of(rank, _length(run, rank)).values())
    ]
    return median(lengths) if lengths else 0.0


def _length(run: RunObservation, rank: RankObservation) -> int:
    return len(run.program.ranks[run.mesh.at(rank.rank).pp])


def _quick(seconds: Sequence[float]) -> float:
    """The value after the fastest tenth."""
    return sorted(seconds)[(len(seconds) - 1) // 10]
