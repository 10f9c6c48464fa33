"""prove --device strict: the layout on emulated GPUs, and the observations there besides the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from superstep.comm.objects import gather
from superstep.cost.program.memory.memory_fit import memory_of
from superstep.errors import Fault
from superstep.launch.failure import trouble_of
from superstep.launch.ranks import World
from superstep.observe.number_format import bytes_text
from superstep.plan.resolution.resolve import Resolved
from superstep.strict.monitor import Monitor, Report
from superstep.train.proof.proof_inputs import ProofCase, prove_case
from superstep.train.proof.prove_tolerance import plain_steps
from superstep.train.proof.verdict import ProofVerdict

MOST_SHOWN = 10
"""Shown races, and waiting lines, over all ranks."""

WARM_STEPS = 1
"""Steps before the observed one: the first one fills caches."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Observations on a rank's GPU.

    Attributes:
        step: in one step of training alone.
        all: in that one, in those before, and in the proof.
    """

    step: Report
    all: tuple[Report, ...]


def prove_emulated(world: World, case: ProofCase) -> tuple[ProofVerdict, list[RankReport]]:
    """The case's verdict, and the observations of each rank's GPU; on every rank."""
    monitor = Monitor(world.device.index)
    steps: list[Report] = []
    with _races_in_error(world.rank, monitor, steps):
        for number, _ in enumerate(plain_steps(world, case.run, case.batches[:1] * (WARM_STEPS + 1))):
            steps.append(monitor.report())
            monitor.record(is_recording=number + 1 == WARM_STEPS)
        verdict = prove_case(world, case)
        return verdict, gather(RankReport(steps[-1], (*steps, monitor.report())), RankReport)


@contextmanager
def _races_in_error(rank: int, monitor: Monitor, steps: Sequence[Report]) -> Iterator[None]:
    """Add the races so far to a fault that ends the run: they may be its cause."""
    try:
        yield
    except Exception as error:
        races = _total([*(step.races for step in steps), monitor.races()])
        known = trouble_of(rank, error).error
        if not races or not isinstance(known, Fault):
            raise
        lines = "\n".join(("RACES before this:", *_count_lines(races)))
        raise Fault(f"{known.message}\n{lines}", rank=rank) from (error.__cause__ or error)


def write_emulated_lines(run: Resolved, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Observations of the GPUs: races and waits of all ranks, the fullest of them, and uses of other ranks' GPUs."""
    races = _total(report.races for rank in ranks for report in rank.all)
    waits = _total(rank.step.host_waits for rank in ranks)
    fullest = max((rank.step for rank in ranks), key=lambda step: step.peak_bytes)
    issued = sum(report.launches for rank in ranks for report in rank.all)
    predicted = "" if run.decoder is None else f", {bytes_text(max(rank.bytes for rank in memory_of(run)))} predicted"
    yield f"On {len(ranks)} emulated GPU{'s' * (len(ranks) > 1)} with {bytes_text(fullest.device_bytes)}:"
    yield f"  {'peak':12}{bytes_text(fullest.peak_bytes)} in a step, on the fullest GPU{predicted}"
    yield f"  {'host waits':12}{waits.total():,} in a step, on all ranks together"
    yield from _count_lines(waits)
    yield f"  {'races':12}{len(races) or 'none'} in {issued:,} kernels, copies and collectives"
    yield from _count_lines(races)
    foreign = list(_foreign_contexts(ranks))
    for number, other, line in foreign:
        yield f"  {'context':12}rank {number} also uses cuda:{other}, first in {line}; its own GPU is cuda:{number}"
    if races:
        yield "RACES: on a GPU the numbers above depend on chance."
    elif foreign:
        yield (
            "NO RACE, BUT A RANK USES ANOTHER RANK'S GPU: each context takes about 500 MiB there, and the other rank "
            "may run out of memory."
        )
    else:
        yield "NO RACE: all uses of the same memory are ordered."


def _total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Counts by texts that are equal on every rank and in every step: without the numbers of streams and calls."""
    total = Counter[str]()
    for count in counts:
        for text, times in count.items():
            total[re.sub(r"call \d+ of communicator \S+: |aten::| o[fn] stream \d+", "", text)] += times
    return total


def _count_lines(counts: Counter[str]) -> Iterator[str]:
    for text, count in counts.most_common(MOST_SHOWN):
        yield f"    {count:,}x {text}"
    if len(counts) > MOST_SHOWN:
        yield f"    and {len(counts) - MOST_SHOWN} more"


def _foreign_contexts(ranks: Sequence[RankReport]) -> Iterator[tuple[int, int, str]]:
    """Each rank that has used another GPU than its own: the rank, the GPU, and the first line that did."""
    for number, rank in enumerate(ranks):
        last = rank.all[-1]
        for other in sorted(last.contexts - {number}):
            yield number, other, last.context_lines[other]


def is_clean(ranks: Sequence[RankReport]) -> bool:
    """Whether no fault was observed."""
    return not any(report.races for rank in ranks for report in rank.all) and not any(_foreign_contexts(ranks))
