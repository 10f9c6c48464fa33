"""Where the time of the last steps went on each rank, and which rank takes longer than its peers over the same work.

A step here is from where its program begins to where the next one does, so that it has what lies between them as well:
the wait for a batch, a validation, a checkpoint, what is told of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from superstep.observe.doctor.observations import Note, RankSeen, RunSeen

STEPS, WINDOW_S = 30, 3.0
"""How many steps are looked at, and as many more as make so long: what a busy machine does in a moment says nothing."""

ENOUGH = 5
"""How many there must be for anything to be said of them."""

SLOW = 1.3
"""How many times what its peers take a rank must take to be called slow. The fastest tenth of its steps is held against
theirs, less what it waits for a processor: other work of the machine takes from some steps, and not from all.
"""


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where one rank's time went, in seconds of all steps together.

    Attributes:
        steps: how many.
        whole_s: all of it.
        work_s: on instructions.
        wait_s: within programs, for other ranks.
        beside_s: outside of programs, by what the rank said that it does.
    """

    steps: int
    whole_s: float
    work_s: float
    wait_s: float
    beside_s: Mapping[str, float] = field(default_factory=dict)

    def share(self, what: str) -> float:
        """Of the time that went into something beside the programs."""
        return self.beside_s.get(what, 0.0) / self.whole_s if self.whole_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that takes longer than its peers.

    Attributes:
        rank: who.
        times: as long, over all that it computes.
        what: the instruction that costs most of it.
        own_s: what that takes it in one step.
        peers_s: what it takes them, in the median.
        steps: that were looked at.
    """

    rank: int
    times: float
    what: str
    own_s: float
    peers_s: float
    steps: int


def steps_of(rank: RankSeen, length: int) -> dict[int, list[Note]]:
    """The notes of each run of the step's program that is there whole, by the number of the run.

    Args:
        rank: whose.
        length: of its list in that program.
    """
    by_run = rank.done_by_run()
    # An evaluation has other instructions, and never the last one of a step.
    whole = {run: notes for run, notes in by_run.items() if len(notes) == length and notes[-1].what == "step"}
    runs = sorted(whole)
    first = max(0, len(runs) - STEPS)
    while first and whole[runs[-1]][0].ready_s - whole[runs[first]][0].ready_s < WINDOW_S:
        first -= 1
    return {run: whole[run] for run in runs[first:]}


def spent(run: RunSeen) -> dict[int, TimeSpent]:
    """Of every rank that has done ``ENOUGH`` steps."""
    by_rank = {rank.rank: _time_spent(rank, _length(run, rank)) for rank in run.ranks}
    return {rank: each for rank, each in by_rank.items() if each is not None}


def _time_spent(rank: RankSeen, length: int) -> TimeSpent | None:
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


def slowest(run: RunSeen) -> list[Slow]:
    """Ranks that take ``SLOW`` times as long as those that run the same list, the slowest first."""
    alike: dict[int, list[RankSeen]] = {}
    for rank in run.ranks:
        alike.setdefault(run.mesh.at(rank.rank).pp, []).append(rank)
    slow_ranks = [slow for peers in alike.values() if len(peers) > 1 for slow in _slow_of(run, peers)]
    return sorted(slow_ranks, key=lambda slow: -slow.times)


def _slow_of(run: RunSeen, ranks: Sequence[RankSeen]) -> list[Slow]:
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
            slow_ranks.append(Slow(rank, own_s / peers_s, what, own, other, len(common)))
    return slow_ranks


def _costliest(
    steps: Mapping[int, Mapping[int, Sequence[Note]]], rank: int, peers: Sequence[int], common: Sequence[int]
) -> tuple[str, float, float]:
    """The instruction over which a rank loses most: its words, what it takes, and what it takes its peers."""
    length = len(steps[rank][common[0]])

    def own(who: int, at: int) -> float:
        return _quick([steps[who][run][at].own_s for run in common])

    each = [(own(rank, at), median(own(peer, at) for peer in peers), at) for at in range(length)]
    own_s, peers_s, at = max(each, key=lambda one: one[0] - one[1])
    return steps[rank][common[0]][at].what, own_s, peers_s


def step_s(run: RunSeen) -> float:
    """The median time from the begin of a step to that of the next, on any rank; 0.0 where that is not known."""
    lengths = [
        later[0].ready_s - notes[0].ready_s
        for rank in run.ranks
        for notes, later in pairwise(steps_of(rank, _length(run, rank)).values())
    ]
    return median(lengths) if lengths else 0.0


def _length(run: RunSeen, rank: RankSeen) -> int:
    return len(run.program.ranks[run.mesh.at(rank.rank).pp])


def _quick(seconds: Sequence[float]) -> float:
    """The first tenth of them."""
    return sorted(seconds)[(len(seconds) - 1) // 10]
