"""Who hangs, as a function of what is known of the ranks of a world: a table of cases, no clocks and no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superstep.monitor import hang_rules as rules
from superstep.monitor.activity import Activity
from superstep.monitor.gpu_progress import GpuProgress
from superstep.monitor.hang_rules import StalledRank, gil_held_s, who_hangs
from superstep.monitor.status_page import Heartbeat

HOST = Heartbeat(
    beats=90, doing=Activity.WORKS, step=5, index=9, longest_s=0.02, instruction="step", ticks=40, ticker=7,
    pause_s=0.12, expected_s=0.1,
)  # fmt: skip
GPU = GpuProgress(
    issued=60, passed=50, doing=Activity.WORKS, run=5, step=5, index=3, line=4, instruction="forward u1 m0",
    longest_s=0.02, since_ns=1,
)  # fmt: skip
LONG_S = 10_000.0


def rank(doing=Activity.WORKS, index=3, *, stands_s=LONG_S, held_s=0.0, longest_s=0.02, host=HOST):
    """A rank whose GPU is there; its host sleeps all the time, and has had no processor."""
    gpu = replace(GPU, doing=doing, index=index, longest_s=longest_s)
    beat = replace(host, gpu=gpu)
    return StalledRank(beat, unmoved_s=stands_s, held_s=held_s, quiet_s=stands_s, cpu_s=0.0)


WAITS, OTHER = Activity.WAITS, Activity.OTHER
FIRST = {"longest_s": 0.0}

CASES = {
    "a GPU that stands in a kernel, and one that waits for it": ([rank(), rank(WAITS, 6)], (0, ())),
    "the one behind, whose collective the other is in": ([rank(index=5), rank(index=3)], (1, ())),
    "two that stand alike: either": ([rank(), rank()], (0, (1,))),
    "alone": ([rank()], (0, ())),
    "one that goes on": ([rank(), rank(WAITS, 6, stands_s=0.5)], None),
    "one that is slow outside of its programs": ([rank(), rank(OTHER)], None),
    "and one that waits for it": ([rank(WAITS, 6), rank(OTHER)], None),
    "all wait for a collective": ([rank(WAITS, 6), rank(WAITS, 6)], None),
    "all are beside their programs": ([rank(OTHER), rank(OTHER)], None),
    "a pause of four seconds": ([rank(stands_s=4.0), rank(WAITS, 6, stands_s=4.0)], None),
    "just short of the limit": ([rank(stands_s=rules.GPU_S - 1), rank(WAITS)], None),
    "at the limit": ([rank(stands_s=rules.GPU_S), rank(WAITS)], (0, ())),
    "twenty times what it took": ([rank(stands_s=99.0, longest_s=5.0), rank(WAITS)], None),
    "a first backward of 90 s": ([rank(stands_s=90.0, **FIRST), rank(WAITS, stands_s=90.0)], None),
    "a first one without an end": ([rank(stands_s=rules.GPU_FIRST_S, **FIRST), rank(WAITS)], (0, ())),
    "a first one that others wait for within what they know": (
        [rank(index=5, stands_s=90.0), rank(index=4, stands_s=90.0, **FIRST)], None,
    ),
    "a lock that is kept beside a program": ([rank(WAITS), rank(OTHER, held_s=LONG_S)], (1, ())),
    "a lock that is kept for two seconds": (
        [rank(stands_s=2.5, held_s=2.0), rank(WAITS, stands_s=2.5)], None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_hangs_on_gpus_is_told_by_how_far_they_have_come(case):
    ranks, expected = CASES[case]
    found = who_hangs(dict(enumerate(ranks)))
    assert (found and (found.process, found.others)) == expected


def test_a_host_that_sleeps_or_computes_ahead_of_its_gpu_is_no_sign():
    """All hosts stand in an instruction that they know; their GPUs wait for a collective that is slow."""
    for quiet_s, cpu_s in ((LONG_S, 0.0), (0.0, LONG_S)):
        ranks = [replace(rank(WAITS, 6), quiet_s=quiet_s, cpu_s=cpu_s) for _ in range(2)]
        assert who_hangs(dict(enumerate(ranks))) is None


def test_what_is_said_is_of_the_gpu_and_not_of_its_host():
    found = who_hangs({7: rank(), 8: rank(WAITS, 6)})
    assert (found.beat.step, found.beat.index, found.beat.instruction) == (5, 3, "forward u1 m0")
    assert "no host and no GPU has made progress for 10000 s" in found.why
    assert "10 more instructions wait in its GPU's queue" in found.why


def test_where_ranks_of_other_hosts_are_not_known_only_a_lock_that_is_kept_is_a_sign():
    assert who_hangs({1: rank()}, is_whole=False) is None
    assert who_hangs({1: rank(held_s=LONG_S)}, is_whole=False).process == 1


def test_a_predicted_step_makes_the_first_time_longer():
    host = replace(HOST, expected_s=20.0)
    ranks = {1: rank(stands_s=399.0, host=host, **FIRST), 2: rank(WAITS, stands_s=401.0)}
    assert who_hangs(ranks) is None
    assert who_hangs({**ranks, 1: rank(stands_s=400.0, host=host, **FIRST)}).process == 1


@pytest.mark.parametrize(
    ("cpu_s", "is_ready", "expected_s"),
    [
        (0.0, False, 0.25),  # who has the lock sleeps in C
        (0.0, True, 0.0),  # it has no processor
        (0.02, True, 0.02),  # a twelfth of one
        (0.25, True, 0.25),  # one of its own
        (2.0, True, 0.25),  # eight threads compute
    ],
)
def test_a_lock_is_kept_only_while_its_process_has_a_processor_or_wants_none(cpu_s, is_ready, expected_s):
    assert gil_held_s(0.25, cpu_s, is_ready=is_ready) == expected_s


ON_CPU = StalledRank(HOST, unmoved_s=30.0)
CPU_WAITS = StalledRank(replace(HOST, doing=WAITS), unmoved_s=30.0)
ON_CPUS = {
    "held": ([replace(ON_CPU, held_s=1.25), CPU_WAITS], 0),
    "held, beside a program": ([CPU_WAITS, replace(ON_CPU, beat=replace(HOST, doing=OTHER), held_s=2.0)], 1),
    "still": ([replace(ON_CPU, quiet_s=4.0), CPU_WAITS], 0),
    "still, and another computes": ([replace(ON_CPU, quiet_s=9.0), replace(ON_CPU, cpu_s=9.0)], None),
    "busy": ([CPU_WAITS, replace(ON_CPU, cpu_s=20.0)], 1),
    "slow": ([CPU_WAITS, replace(ON_CPU, cpu_s=19.0)], None),
    "goes on": ([replace(ON_CPU, quiet_s=9.0), replace(CPU_WAITS, unmoved_s=0.9)], None),
}


@pytest.mark.parametrize("case", ON_CPUS)
def test_who_hangs_on_cpus_is_told_by_what_their_threads_do(case):
    ranks, expected = ON_CPUS[case]
    found = who_hangs(dict(enumerate(ranks)))
    assert (found and found.process) == expected
