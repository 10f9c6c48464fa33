"""The doctor's page: the diagnosis, which rank waits for which, where the time went, and each rank's place in the
code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from superstep.observe.doctor.diagnose import Diagnosis, Finding
from superstep.observe.doctor.observations import CHECKPOINT, DATA, REPORT, VALIDATION, RankObservation, RunObservation
from superstep.observe.doctor.stragglers import TimeSpent
from superstep.observe.doctor.wait_graph import RankWait
from superstep.observe.number_format import bytes_text, seconds_text

CALLS = 3
"""Calls of a stack that are shown, from the innermost on."""

STARVED = 0.1
"""Share of time from which waiting for a processor is reported."""

BESIDE = (DATA, VALIDATION, CHECKPOINT, REPORT)


def page(name: str, run: RunObservation, verdict: Diagnosis, *, width: int, is_whole: bool) -> str:
    """The page.

    Args:
        name: of the run.
        run: the observation.
        verdict: the diagnosis.
        width: columns.
        is_whole: whether to show whole stacks, of every thread.
    """
    width = max(60, min(width, 120))
    parts = [list(_head(name, run, verdict, width)), list(_waits(run, verdict)), list(_time_lines(verdict))]
    parts += [list(_processes(run))]
    if verdict.findings or is_whole:
        parts += [list(_stacks(run, is_whole=is_whole))]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _head(name: str, run: RunObservation, verdict: Diagnosis, width: int) -> Iterator[str]:
    step = max((rank.step for rank in run.ranks), default=0)
    pace = f", {seconds_text(verdict.step_s)} a step" if verdict.step_s else ""
    when = f"in step {step}{pace}" if run.is_live else f"when it failed in step {step}{pace}"
    going = ", no progress" if verdict.is_still and run.is_live else ""
    yield f"{name}: {len(run.ranks)} rank{'s' if len(run.ranks) > 1 else ''} on {run.host}, {when}{going}"
    if not verdict.findings:
        yield "no problem was detected"
    for number, finding in enumerate(verdict.findings, start=1):
        yield from _finding(number, finding, width)


def _finding(number: int, finding: Finding, width: int) -> Iterator[str]:
    yield from textwrap.wrap(finding.what, width, initial_indent=f"{number}. ", subsequent_indent="   ")
    for line in finding.evidence:
        yield from textwrap.wrap(line, width, initial_indent="   - ", subsequent_indent="     ")


def _waits(run: RunObservation, verdict: Diagnosis) -> Iterator[str]:
    waits = {wait.rank: wait for wait in verdict.waits}
    if not verdict.findings and not waits:
        return
    yield "which rank waits for which"
    ranks = {rank.rank: rank for rank in run.ranks}
    for rank in run.ranks:
        wait = waits.get(rank.rank)
        yield f"  rank {rank.rank:<3} {_doing(rank)}{'' if wait is None else f': {_wait(wait, ranks)}'}"


def _doing(rank: RankObservation) -> str:
    since = f" for {seconds_text(rank.since_s)}" if rank.since_s else ""
    if rank.doing == "apart":
        return f"{rank.what or 'between its programs'}{since}, after step {rank.step}"
    at = f"{rank.brief} of step {rank.step}"
    return f"waits in {at}{since}" if rank.doing == "waits" else f"works on {at}{since}"


def _wait(wait: RankWait, ranks: dict[int, RankObservation]) -> str:
    if wait.past:
        return f"{wait.what}, which rank {', '.join(map(str, wait.past))} is past"
    others = (f"rank {rank}, which {_briefly(ranks[rank])}" for rank in wait.missing)
    return f"{wait.what} from {'; '.join(others)}"


def _briefly(rank: RankObservation) -> str:
    verb = {"apart": "is in", "waits": "waits in", "works": "is in"}[rank.doing]
    since = f"{seconds_text(rank.since_s)} " if rank.since_s else ""
    what = rank.brief or "no program"
    return verb.replace("is in", f"is {since}in") + f" {what}"


def _time_lines(verdict: Diagnosis) -> Iterator[str]:
    if not verdict.spent:
        return
    steps = max(each.steps for each in verdict.spent.values())
    yield f"where the time of the last {steps} steps went"
    yield "           compute   waits" + "".join(f"{name:>12}" for name in BESIDE) + "    the rest"
    for rank, each in sorted(verdict.spent.items()):
        yield f"  rank {rank:<3} " + _shares(each)


def _shares(each: TimeSpent) -> str:
    whole_s = each.whole_s or 1.0
    shares = [each.work_s / whole_s, each.wait_s / whole_s]
    beside = [each.share(name) for name in BESIDE]
    # Both include the computation of a validation: its instructions belong to a program.
    rest = max(
        0.0, 1.0 - sum(shares) - sum(share for name, share in zip(BESIDE, beside, strict=True) if name != VALIDATION)
    )
    return "".join(f"{share:8.1%}" for share in shares) + "".join(f"{share:12.1%}" for share in (*beside, rest))


def _processes(run: RunObservation) -> Iterator[str]:
    if not run.is_live:
        return
    for rank in run.ranks:
        swapped = f", {bytes_text(rank.swapped_bytes)} swapped" if rank.swapped_bytes else ""
        starved = f", waited for a processor {rank.starved:.0%} of the time" if rank.starved >= STARVED else ""
        yield f"rank {rank.rank}: process {rank.process}, {bytes_text(rank.resident_bytes)} in memory{swapped}{starved}"
    if run.disk.free_bytes is not None:
        yield f"disk: {bytes_text(run.disk.free_bytes)} free"


def _stacks(run: RunObservation, *, is_whole: bool) -> Iterator[str]:
    for rank in run.ranks:
        threads = rank.stacks if is_whole else rank.stacks[:1]
        for number, calls in enumerate(threads):
            yield f"stack of rank {rank.rank}{f', thread {number}' if number else ''}, the innermost call first"
            yield from (f"  {call}" for call in (calls if is_whole else calls[:CALLS]))
