"""Shared memory between ranks of a host, and groups over several: right sums, in one order, whatever is under way."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from longer import longer, many_ranks
from shared_groups import CPU, group_of
from superstep.comm.backend import reach
from superstep.comm.objects import gather

pytestmark = pytest.mark.multiproc

SIZES = (0, 1, 3, 1000, 16 * 1024, 16 * 1024 + 1, 70_001, 300_000)
"""Elements: nothing, less than a vector, about what goes in one step, more than a slot, and than all slots."""
HALVES = (torch.bfloat16, torch.float16)


def drawn(rank, count, dtype, seed=0):
    """What a rank brings, which all can draw."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=generator) * 100).to(dtype)


def in_order(parts, seats=None):
    """The sum in rank order: of bf16 and fp16 in fp32, rounded once. With several hosts, of the sums of each."""
    if seats:
        return in_order([in_order(parts[first : first + seats]) for first in range(0, len(parts), seats)])
    total = parts[0].float() if parts[0].dtype in HALVES else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _sum_halves(rank, world):
    """All numbers of fp16, and after each of them a number that makes it overflow, vanish or round."""
    group = group_of(rank, world)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    generator = torch.Generator().manual_seed(0)
    others = every[torch.randint(0, 2**16, (2**16,), generator=generator)]
    for other in (torch.zeros_like(every), others, torch.full_like(every, 2.0**-24)):
        summed = (every, other)[rank].clone()
        dist.all_reduce(summed, group=group)
        assert torch.equal(summed.nan_to_num(nan=7.0), (every.float() + other.float()).half().nan_to_num(nan=7.0))
    dist.destroy_process_group(group)


def test_sums_of_fp16_round_as_torch_rounds(pool):
    pool.run(2, _sum_halves)


def _every_collective(rank, world, seats=None):
    group = group_of(rank, world, seats=seats)
    assert dist.get_backend(group) == ("two_levels" if seats else "shared")
    for dtype in (torch.float32, torch.float64, *HALVES, torch.int32, torch.int64, torch.uint8):
        for count in SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[:4]:
            each = [drawn(r, world * count, dtype, seed=1) for r in range(world)]
            own, mine = each[rank], slice(rank * count, (rank + 1) * count)
            summed = own.clone()
            dist.all_reduce(summed, group=group)
            assert torch.equal(summed, in_order(each, seats)), ("all-reduce", dtype, count)
            largest = own.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            assert torch.equal(largest, torch.stack(each).amax(0)), ("largest", dtype, count)
            part = own.new_empty(count)
            dist.reduce_scatter_single(part, own, group=group)
            assert torch.equal(part, in_order(each, seats)[mine]), ("reduce-scatter", dtype, count)
            dist.reduce_scatter_single(own[mine], own, group=group)
            assert torch.equal(
                own[mine], in_order([drawn(r, world * count, dtype, 1) for r in range(world)], seats)[mine]
            )
            whole = own.new_empty(world * world * count)
            dist.all_gather_single(whole, drawn(rank, world * count, dtype, 1), group=group)
            assert torch.equal(whole, torch.cat([drawn(r, world * count, dtype, 1) for r in range(world)]))
            sent = drawn(world - 1, count, dtype) if rank == world - 1 else own.new_zeros(count)
            dist.broadcast(sent, group=group, group_src=world - 1)
            assert torch.equal(sent, drawn(world - 1, count, dtype)), ("broadcast", dtype, count)
            swapped = own.new_empty(world * count)
            dist.all_to_all_single(swapped, drawn(rank, world * count, dtype, 1), group=group)
            assert torch.equal(swapped, torch.cat([drawn(r, world * count, dtype, 1)[mine] for r in range(world)]))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("world", many_ranks([2, 3, 4], most=3))
def test_every_collective_of_every_size_has_the_sum_in_rank_order(pool, world):
    pool.run(world, _every_collective, timeout_s=120)


@pytest.mark.parametrize(("world", "seats"), [(4, 2), *longer([(6, 2), (6, 3)], lambda way: True)])
def test_over_several_hosts_sums_are_in_the_order_of_ranks_then_of_hosts(pool, world, seats):
    pool.run(world, _every_collective, seats, timeout_s=120)


def _uneven(rank, world, seats=None):
    group = group_of(rank, world, seats=seats)
    for factor in (1, 20_000):
        counts = [[(a * 3 + b) % 4 * factor for b in range(world)] for a in range(world)]  # from a to b; some nothing
        given = drawn(rank, sum(counts[rank]), torch.float32)[:, None].expand(-1, 2).contiguous()
        coming = [counts[a][rank] for a in range(world)]
        out = given.new_empty(sum(coming), 2)
        dist.all_to_all_single(out, given, coming, counts[rank], group=group)
        wanted = [drawn(a, sum(counts[a]), torch.float32).split(counts[a])[rank] for a in range(world)]
        assert torch.equal(out, torch.cat(wanted)[:, None].expand(-1, 2))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("seats", [None, 2])
def test_parts_of_an_exchange_may_differ_and_be_empty(pool, seats):
    pool.run(4, _uneven, seats)


def _lines(rank, world, seats):
    """Much is under way at once, and waited for in another order."""
    group = group_of(rank, world, seats=seats)
    sums = [drawn(rank, count, torch.float32, seed=count) for count in SIZES]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in sums]
    for work in reversed(works):
        work.wait()
    for count, each in zip(SIZES, sums, strict=True):
        assert torch.equal(each, in_order([drawn(r, count, torch.float32, seed=count) for r in range(world)], seats))
    assert all(work.is_completed() for work in works)
    # Everybody sends before he receives, more than there is room for.
    going, coming = drawn(rank, 700_000, torch.float32), torch.empty(700_000)
    up = dist.isend(going, group=group, group_dst=(rank + 1) % world)
    down = dist.irecv(coming, group=group, group_src=(rank - 1) % world)
    up.wait()
    down.wait()
    assert torch.equal(coming, drawn((rank - 1) % world, 700_000, torch.float32))
    # What nobody waits for is done all the same, and keeps its memory.
    for step in range(50):
        dist.all_reduce(torch.full((1 + 4000 * (step % 9),), float(step)), group=group, async_op=True)
    last = torch.ones(1)
    dist.all_reduce(last, group=group)
    assert float(last) == world
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("world", "seats"), [(2, None), (4, None), (4, 2)])
def test_what_is_under_way_together_keeps_its_order(pool, world, seats):
    pool.run(world, _lines, seats)


def _crowd(rank, world, seed):
    """The same drawn operations on every rank, on groups that cross, some of them waited for later."""
    there = reach(rank, world, CPU)
    members = [(0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (1, 2, 3)]
    groups = {m: there.group(m, device=CPU, timeout=timedelta(seconds=30)) for m in members}
    draw, waiting = random.Random(seed), []
    for number in range(400):
        ranks, count, is_waited = draw.choice(members), draw.choice((1, 100, 20_000, 120_000)), draw.random() < 0.5
        kind = draw.choice(("sum", "message", "gather"))
        if rank not in ranks:
            continue
        group, me = groups[ranks], ranks.index(rank)
        own = drawn(rank, count, torch.float32, seed=number)
        theirs = [drawn(r, count, torch.float32, seed=number) for r in ranks]
        if kind == "sum":
            work, out, wanted = dist.all_reduce(own, group=group, async_op=True), own, in_order(theirs)
        elif kind == "gather":
            out = own.new_empty(len(ranks) * count)
            work, wanted = dist.all_gather_single(out, own, group=group, async_op=True), torch.cat(theirs)
        elif me < 2:
            out = own if me == 0 else torch.empty_like(own)
            work = dist.isend(own, group=group, group_dst=1) if me == 0 else dist.irecv(out, group=group, group_src=0)
            wanted = theirs[0]
        else:
            continue
        waiting.append((work, out, wanted))
        while is_waited and waiting:
            work, out, wanted = waiting.pop()
            work.wait()
            assert torch.equal(out, wanted), (seed, number, kind)
    for work, out, wanted in waiting:
        work.wait()
        assert torch.equal(out, wanted)
    for group in groups.values():
        if group is not None:
            dist.destroy_process_group(group)


def test_many_groups_that_cross_do_not_disturb_each_other(pool):
    for seed in range(3):
        pool.run(4, _crowd, seed)


def _to_and_fro(rank, world):
    """A message that comes late, while the thread that waits for it sleeps, keeps none that goes."""
    group = group_of(rank, world)
    coming, start = torch.empty(300_000), time.monotonic()
    for _ in range(40):
        if rank == 0:
            work = dist.irecv(coming, group=group, group_src=1)
            time.sleep(0.005)  # until the thread sleeps
            dist.isend(torch.ones(1), group=group, group_dst=1).wait()
            work.wait()
        else:
            dist.irecv(coming[:1], group=group, group_src=0).wait()
            dist.isend(coming, group=group, group_dst=0).wait()
    return time.monotonic() - start


def test_who_sleeps_is_woken_and_does_not_look_now_and_then(pool):
    assert max(pool.run(2, _to_and_fro)) < 2.0, "of 40 rounds each waited until somebody looked"


def _looks(rank, world):
    group = group_of(rank, world)
    work = dist.all_reduce(total := torch.ones(1), group=group, async_op=True)
    gather("has begun", str)
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline
    return float(total)


def test_who_only_looks_sees_the_end(pool):
    assert pool.run(3, _looks) == [3.0] * 3
