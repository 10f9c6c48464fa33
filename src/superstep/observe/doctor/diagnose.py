"""Diagnosis: from observations of a run to what is wrong with it. A pure function, for live and failed runs.

    a rank has stopped or ended              the system reports its process so
    no progress for too long                 the ranks at the end of the chains of waiting ranks hang, or one has
                                             passed a sum that others are still in
    progress                                 is a rank slower than its peers, does it wait for data, does it swap?
    in any case                              does its memory grow, is there disk space?

A healthy run has no findings: each rule has a floor, and what took long before may take long again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from superstep.observe.doctor.observations import CHECKPOINT, DATA, VALIDATION, RankObservation, RunObservation
from superstep.observe.doctor.stragglers import SlowRank, TimeSpent, measure_spent, slowest, step_s
from superstep.observe.doctor.wait_graph import RankWait, Waits, first_of

Kind = Literal[
    "fault", "stopped", "gone", "held", "hook", "hang", "busy", "skipped", "raised", "circle", "data", "beside", "slow",
    "swaps", "memory", "disk",
]  # fmt: skip

STILL_S = 1.0
"""Seconds that a rank must have been at one thing before it can be a finding."""

TIMES = 5.0
"""How many times longer than before a thing may take."""

FIRST_S, FIRST_ASLEEP_S = 60.0, 10.0
"""Seconds for an instruction's first run: awake; asleep while all others wait."""

GPU_S, GPU_FIRST_S = 10.0, 300.0
"""The same on a GPU, where instructions compile kernels: for a new shape; in a first run."""

BESIDE_S: Mapping[str, float] = {DATA: 2.0, VALIDATION: 60.0, CHECKPOINT: 30.0}
BESIDE_ELSE_S = 10.0
"""Seconds that a rank may spend outside its programs while others wait for it, unless that took as long before."""

UNKNOWN_S = 60.0
"""Seconds without progress where no rank is known to be the cause."""

DATA_SHARE = 0.2
"""The largest share of time for waits for batches."""

SWAPPED_BYTES = 16 * 2**20
SWAPS_PER_S = 20.0
"""Waits for swapped pages in a second that are still normal."""

GROWTH, GROWTH_BYTES = 1.04, 64 * 2**20
"""Growth of memory that is a finding: factor from one quarter of a life to the next, and bytes over the last three."""

LEAST_FREE_BYTES = 16 * 2**20

_NAMED = ("rank", "step")
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")
_CROSSED = re.compile("at another operation|[Tt]imed out|[Tt]imeout")
"""A collective's error where not all ranks have joined it: they joined another one, or it timed out."""
HERE = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rank: which has it; None where it is not one rank.
        step: 0 where none applies.
        at: the instruction, or what the rank does outside its programs; else empty.
        what: is wrong, in words.
        evidence: lines that show it.
    """

    kind: Kind
    what: str
    rank: int | None = None
    step: int = 0
    at: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is wrong with a run, the first cause first, and the observations behind it.

    Attributes:
        findings: empty for a healthy run.
        measure_uses: each rank's time by use.
        is_still: whether there is no progress.
        step_s: the median of the last steps; 0.0 if unknown.
    """

    findings: tuple[Finding, ...]
    waits: tuple[RankWait, ...]
    spent: Mapping[int, TimeSpent]
    is_still: bool
    step_s: float


def diagnose(run: RunObservation) -> Diagnosis:
    waits, took_s = Waits(run), step_s(run)
    is_still = bool(run.ranks) and not any(rank.has_moved for rank in run.ranks)
    pace = measure_spent(run)
    findings = [*_end_findings(run, waits), *_processes(run)]
    if is_still and run.is_live and not findings:
        findings += _standing(run, waits, took_s)
    if run.is_live and not findings:
        findings += _data(pace)
        # Whether a rank lacks a processor is seen of ranks that run alone.
        goes_on = all(rank.has_moved for rank in run.ranks)
        findings += _slow(slowest(run), {each.rank for each in findings}) if goes_on else []
    findings += [*_swapping(run), *_growing(run), *_disk(run, findings)]
    return Diagnosis(findings=tuple(findings), waits=waits.all, spent=pace, is_still=is_still, step_s=took_s)


def _end_findings(run: RunObservation, waits: Waits) -> Iterator[Finding]:
    if not run.fault:
        return
    if _CROSSED.search(run.fault):
        yield from _skip_findings(run, waits)[:1]
    rank, step = (None if at is None else int(at[1]) for at in (re.search(rf"\b{w} (\d+)", run.fault) for w in _NAMED))
    rank = run.ranks[0].rank if rank is None and len(run.ranks) == 1 else rank
    failed = next((each for each in run.ranks if each.rank == rank), None)
    kind: Kind = "disk" if any(words in run.fault for words in _NO_ROOM) else "fault"
    at = "" if failed is None else failed.what
    step = step if step is not None or failed is None else failed.step
    yield Finding(kind=kind, what=run.fault, rank=rank, step=step or 0, at=at)


def _processes(run: RunObservation) -> Iterator[Finding]:
    """Ranks whose process does not run."""
    if not run.is_live:
        return
    for rank in run.ranks:
        if rank.state in ("T", "t"):
            by = "a debugger holds it" if rank.state == "t" else "SIGSTOP, or Ctrl-Z"
            what = f"rank {rank.rank} is stopped in {_where(rank)}: process {rank.process}, {by}"
            yield _of(rank, "stopped", what, f"kill -CONT {rank.process} lets it go on")
        elif rank.process and rank.state in ("", "Z"):
            yield _of(
                rank, "gone", f"rank {rank.rank} has ended in {_where(rank)}: process {rank.process} is not there"
            )


def _standing(run: RunObservation, waits: Waits, took_s: float) -> list[Finding]:
    """Why there was no progress for too long."""
    ranks = {rank.rank: rank for rank in run.ranks}
    held = [rank for rank in run.ranks if rank.is_held and rank.since_s >= _limit_s(rank, took_s)]
    if held:
        return [_lock_finding(rank) for rank in held]
    ends = sorted({end for rank in run.ranks for end in first_of(waits, rank.rank)})
    skipped = _skip_findings(run, waits, least_s=max(STILL_S, 2 * took_s))
    if skipped:
        return skipped[:1]
    raised = [rank for rank in run.ranks if rank.has_raised]
    if raised and min(rank.since_s for rank in run.ranks) >= STILL_S:
        return [_error_finding(max(raised, key=lambda rank: rank.since_s))]
    if not ends:
        return _circle(run, waits)
    # The one that is farthest behind came to it first: others may sleep in what it has not sent.
    hangs = [ranks[end] for end in ends if end in ranks and ranks[end].since_s >= _limit_s(ranks[end], took_s)]
    hangs = [rank for rank in hangs if rank.doing != "waits"]
    if not hangs:
        return _unknown(run, took_s)
    first = min(rank.at for rank in hangs)
    return [_hang(rank, run) for rank in hangs if rank.at == first]


def _unknown(run: RunObservation, took_s: float) -> list[Finding]:
    """No progress, and no known rank hangs."""
    since_s = min(rank.since_s for rank in run.ranks)
    if since_s < max(UNKNOWN_S, 2 * TIMES * took_s):
        return []
    first = min(run.ranks, key=lambda rank: rank.at)
    what = f"nothing has gone on for {since_s:.0f} s; rank {first.rank} is farthest behind, in {_where(first)}"
    return [_of(first, "hang", what, *_top(first))]


def _limit_s(rank: RankObservation, took_s: float) -> float:
    """How long a rank may take for what it does."""
    if rank.doing == "apart":
        before = [n.end_s - n.ready_s for n in rank.notes if n.index < 0 and n.what == rank.what]
        floor_s = BESIDE_S.get(rank.what, BESIDE_ELSE_S)
        return max(STILL_S if len(before) > 1 else floor_s, TIMES * max(before, default=0.0), 2 * took_s)
    if rank.longest_s > 0:
        return max(GPU_S if rank.is_on_gpu else STILL_S, TIMES * rank.longest_s)
    if rank.is_on_gpu:
        return GPU_FIRST_S
    return FIRST_ASLEEP_S if rank.is_asleep else FIRST_S


def _lock_finding(rank: RankObservation) -> Finding:
    what = f"rank {rank.rank} hangs in {_where(rank)}: code that is not Python holds the GIL"
    return _of(rank, "held", what, f"none of its other threads has run for {rank.looked_s:.1f} s and more", *_top(rank))


def _skip_findings(run: RunObservation, waits: Waits, least_s: float = 0.0) -> list[Finding]:
    """Ranks that have passed a sum which another has been in for ``least_s``: the odd one of several has left
    it out.
    """
    ranks, findings = {rank.rank: rank for rank in run.ranks}, []
    for wait in waits.all:
        here = ranks[wait.rank]
        # Who has raised an error goes on no more; but it may be that of a rank which is not seen here.
        is_sure = len(ranks) == run.mesh.world if here.has_raised else here.since_s >= least_s
        if not wait.past or not is_sure:
            continue
        others = ", ".join(f"rank {rank}, in {_where(ranks[rank])}," for rank in wait.past)
        what = (
            f"rank {wait.past[0]} has left out {wait.what}, or one on its lane before: rank {wait.rank} is still in "
            f"it, and {others} is past it"
        )
        text = f"rank {here.rank} has waited for {here.since_s:.1f} s for what all ranks say they have started"
        if here.has_raised:
            text = f"rank {here.rank} has found another operation in its place, and ended with an error"
        findings.append(
            Finding(kind="skipped", what=what, rank=wait.past[0], step=here.step, at=wait.what, evidence=(text,))
        )
    return findings


def _error_finding(rank: RankObservation) -> Finding:
    what = f"rank {rank.rank} has raised an error in {_where(rank)}, {rank.since_s:.1f} s ago, and nothing goes on"
    return _of(rank, "raised", what, "the launcher says which, once it has ended the ranks")


def _circle(run: RunObservation, waits: Waits) -> list[Finding]:
    """All ranks wait for each other."""
    if any(rank.since_s < STILL_S for rank in run.ranks) or not waits.all:
        return []
    lines = tuple(f"rank {wait.rank} waits for {wait.what} from {_ranks(wait.missing)}" for wait in waits.all)
    first = run.ranks[0]
    return [Finding(kind="circle", what="the ranks wait for each other in a circle", step=first.step, evidence=lines)]


def _hang(observed: RankObservation, run: RunObservation) -> Finding:
    others = [rank.rank for rank in run.ranks if rank.rank != observed.rank]
    waiting = f"{_ranks(others)} cannot go on without it" if others else "nothing goes on"
    if observed.doing == "apart":
        kind: Kind = "data" if observed.what == DATA else "beside"
        doing = {DATA: "waits for its batch", "": "is between its programs"}.get(
            observed.what, f"is in its {observed.what}"
        )
        what = f"rank {observed.rank} {doing}, for {observed.since_s:.1f} s now"
        return _of(observed, kind, what, waiting, *_top(observed))
    sleeps = observed.is_asleep or observed.looked_s == 0.0
    busy = f"computing: {observed.cpu_s:.1f} s of a processor in {observed.looked_s:.1f} s"
    how = "asleep, while Python runs" if sleeps else busy
    if observed.is_on_gpu:
        sleeps, how = True, f"which its GPU has not come past for {observed.since_s:.1f} s"
    took = f"; {observed.longest_s:.2g} s at most before" if observed.longest_s else ""
    if (call := _users_call(observed)) is not None:
        what = f"rank {observed.rank} hangs in {_where(observed)}, in a call of yours: {call}"
        return _of(observed, "hook", what, f"{how}{took}", waiting, *_top(observed))
    what = f"rank {observed.rank} hangs in {_where(observed)}, {how}{took}"
    return _of(observed, "hang" if sleeps else "busy", what, waiting, *_top(observed))


def _users_call(rank: RankObservation) -> str | None:
    """The innermost call in user code: not ours, torch's or Python's."""
    for call in rank.stacks[0] if rank.stacks else ():
        if call.startswith(HERE):
            return None
        if not re.match(r"<|.*/(site-packages|dist-packages|lib/python3[.\d]*)/", call):
            return call
    return None


def _data(pace: Mapping[int, TimeSpent]) -> Iterator[Finding]:
    """Ranks that wait too much for batches."""
    slow = {rank: each for rank, each in pace.items() if each.share(DATA) >= DATA_SHARE}
    for rank, each in sorted(slow.items(), key=lambda one: -one[1].share(DATA)):
        what = f"rank {rank} waits for batches {each.share(DATA):.0%} of its time"
        text = f"{1e3 * each.beside_s[DATA] / each.steps:.0f} ms of each of the last {each.steps} steps"
        others = [other for other in pace if other not in slow]
        faster = (f"{_ranks(others)} {'has' if len(others) == 1 else 'have'} theirs in time",) if others else ()
        yield Finding(kind="data", what=what, rank=rank, at=DATA, evidence=(text, *faster))


def _slow(slow: list[SlowRank], known: set[int | None]) -> Iterator[Finding]:
    """Ranks slower than their peers. A rank that comes late from its batch is also slow to compute, with cold
    caches.
    """
    for each in slow:
        if each.rank not in known:
            what = f"rank {each.rank} is slow: {each.times:.1f}x what its peers take to compute the same"
            text = (
                f"its {each.what} takes {1e3 * each.own_s:.3g} ms, theirs {1e3 * each.peers_s:.3g} "
                f"({each.own_s / max(each.peers_s, 1e-9):.1f}x), the fastest tenth of {each.steps} steps"
            )
            yield Finding(kind="slow", what=what, rank=each.rank, at=each.what, evidence=(text,))


def _swapping(run: RunObservation) -> Iterator[Finding]:
    for rank in run.ranks:
        if rank.swapped_bytes >= SWAPPED_BYTES and rank.faults_per_s >= SWAPS_PER_S:
            what = f"rank {rank.rank} swaps: {_mib(rank.swapped_bytes)} of it are on disk"
            yield _of(rank, "swaps", what, f"it waited for {rank.faults_per_s:.0f} pages a second, in {_where(rank)}")


def _growing(run: RunObservation) -> Iterator[Finding]:
    for rank in run.ranks:
        sizes = [size for _, size in rank.memory]
        quarter = len(sizes) // 4
        if quarter < 3:
            continue
        means = [sum(sizes[n * quarter : (n + 1) * quarter]) / quarter for n in range(4)]
        # The first quarter has the start in it.
        if means[3] - means[1] < GROWTH_BYTES or any(b < GROWTH * a for a, b in pairwise(means[1:])):
            continue
        over_s = rank.memory[-1][0] - rank.memory[quarter][0]
        rate = 60 * (sizes[-1] - sizes[quarter]) / max(over_s, 1.0)
        what = f"rank {rank.rank} grows: {_mib(int(rate))} a minute, {_mib(sizes[-1])} now"
        yield Finding(
            kind="memory", what=what, rank=rank.rank, evidence=(f"for {over_s / 60:.1f} minutes, without an end",)
        )


def _disk(run: RunObservation, findings: list[Finding]) -> Iterator[Finding]:
    free, needed = run.disk.free_bytes, run.disk.needed_bytes
    if free is None or free >= max(needed, LEAST_FREE_BYTES) or any(each.kind == "disk" for each in findings):
        return
    needs = f"; its next checkpoint takes {_mib(needed)}" if needed else ""
    yield Finding(kind="disk", what=f"the run's disk has {_mib(free)} left{needs}", at=CHECKPOINT)


def _of(rank: RankObservation, kind: Kind, what: str, *evidence: str) -> Finding:
    return Finding(kind=kind, what=what, rank=rank.rank, step=rank.step, at=rank.what, evidence=evidence)


def _top(rank: RankObservation) -> tuple[str, ...]:
    return (f"it is at {rank.stacks[0][0]}",) if rank.stacks and rank.stacks[0] else ()


def _where(rank: RankObservation) -> str:
    if rank.doing == "apart":
        return rank.what or "no program"
    return f"{rank.brief} of step {rank.step}"


def _ranks(ranks: tuple[int, ...] | list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
