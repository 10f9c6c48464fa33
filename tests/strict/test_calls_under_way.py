"""Calls of NCCL that nobody waits for: how long their tensors are kept, and which of them an abort ends."""

import re
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from strict_ranks import begin_nccl, gpu_of, run_to_the_end, wait_for_text

pytestmark = pytest.mark.strict

NUMBERS = 1 << 18
BYTES = 4 * NUMBERS


def call_without_a_wait():
    """A small call, which lets go of what the watchdog has found over by then."""
    dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
    time.sleep(0.02)


def drop_the_work(rank, world):
    """What is held behind a call whose tensor and work are dropped, and what was named once it is given back."""
    with gpu_of(rank, world) as (device, report):
        before = torch.cuda.memory_allocated()
        x = torch.ones(NUMBERS, device=device.torch)
        dist.all_reduce(x, async_op=True)
        del x
        held_bytes = torch.cuda.memory_allocated() - before
        while torch.cuda.memory_allocated() - before >= BYTES:
            call_without_a_wait()
        return held_bytes, report().races


def test_the_tensors_of_a_call_that_nobody_waits_for_are_kept_until_it_is_over(pool):
    assert pool.run(1, drop_the_work, timeout_s=60) == [(BYTES, {})]


def drop_the_tensor_later(rank, world, frees):
    """What is named where a tensor ends after the call that nobody waited for."""
    with gpu_of(rank, world) as (device, report):
        x = torch.ones(NUMBERS, device=device.torch)
        alone = sys.getrefcount(x)
        dist.all_reduce(x, async_op=True)
        assert sys.getrefcount(x) > alone
        while sys.getrefcount(x) > alone:
            call_without_a_wait()
        if frees:
            x.untyped_storage().resize_(0)
        del x
        return list(report().races)


def test_a_tensor_that_is_dropped_after_its_call_is_over_is_no_fault(pool):
    assert pool.run(1, drop_the_tensor_later, False, timeout_s=60) == [[]]


def test_a_storage_that_is_emptied_without_a_wait_is_named_whenever_its_call_is_over(pool):
    ((race,),) = pool.run(1, drop_the_tensor_later, True, timeout_s=60)
    assert re.search(r"is freed \(.*test_calls_under_way.py:\d+.*\) while call \d+ of .*all_reduce", race)


def abort_another(rank, world, folder):
    """Rank 0 has calls under way over two groups, which rank 1 never makes; and aborts one of the groups."""
    gpu = begin_nccl(rank, world, folder, 60)
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=3)) for _ in range(2)]
    for group in groups:  # its first call keeps the host
        dist.all_reduce(torch.ones(4, device=gpu), group=group)
    if rank == 0:
        works = [dist.all_reduce(torch.ones(4, device=gpu), group=group, async_op=True) for group in groups]
        groups[0].abort()
        works[1].end.synchronize()
        torch.cuda.synchronize()
    else:
        wait_for_text(folder / "stderr 0", "watchdog")


def test_the_abort_of_one_communicator_leaves_the_calls_of_another_to_the_watchdog(tmp_path):
    (status, text), _ = run_to_the_end(2, abort_another, tmp_path)
    assert status == -6, text
    assert re.search(r"watchdog: call 2 of communicator \S+: all_reduce .* has not ended in its time", text)
