"""Shared memory between ranks of a host: right sums in one order, nobody waited for who will not come, nothing left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import small
from pool import RankError
from superstep.plan.resolve import resolve
from superstep.runtime import native, transport
from superstep.runtime.device import Device
from superstep.runtime.launch import World, gather
from superstep.runtime.mesh import build_mesh
from superstep.runtime.shared import lane, region
from superstep.runtime.transport import GLOO, reach
from superstep.train.proof import close
from superstep.train.proof.close import prove, write_reference

pytestmark = pytest.mark.multiproc

CPU = Device("cpu")
SIZES = (0, 1, 3, 1000, 16 * 1024, 16 * 1024 + 1, 70_001, 300_000)
"""Elements: nothing, less than a vector, about what goes in one step, more than a slot, and than all slots."""


def group_of(rank, world, *, seconds=30.0):
    """Shared memory of all ranks."""
    there = reach(rank, world, CPU)
    assert there.shared is not None, there.why
    return there.group(range(world), device=CPU, timeout=timedelta(seconds=seconds))


def drawn(rank, count, dtype, seed=0):
    """What a rank brings, which all can draw."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=generator) * 100).to(dtype)


def in_order(parts):
    """The sum in rank order: of bf16 in fp32, rounded once."""
    total = parts[0].float() if parts[0].dtype == torch.bfloat16 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _every_collective(rank, world):
    group = group_of(rank, world)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for count in SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[:4]:
            each = [drawn(r, world * count, dtype, seed=1) for r in range(world)]
            own, mine = each[rank], slice(rank * count, (rank + 1) * count)
            summed = own.clone()
            dist.all_reduce(summed, group=group)
            assert torch.equal(summed, in_order(each)), ("all-reduce", dtype, count)
            largest = own.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            assert torch.equal(largest, torch.stack(each).amax(0)), ("largest", dtype, count)
            part = own.new_empty(count)
            dist.reduce_scatter_single(part, own, group=group)
            assert torch.equal(part, in_order(each)[mine]), ("reduce-scatter", dtype, count)
            dist.reduce_scatter_single(own[mine], own, group=group)
            assert torch.equal(own[mine], in_order([drawn(r, world * count, dtype, 1) for r in range(world)])[mine])
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


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_of_every_size_has_the_sum_in_rank_order(pool, world):
    pool.run(world, _every_collective, timeout_s=120)


def _uneven(rank, world):
    group = group_of(rank, world)
    for factor in (1, 20_000):
        counts = [[(a * 3 + b) % 4 * factor for b in range(world)] for a in range(world)]  # from a to b; some nothing
        given = drawn(rank, sum(counts[rank]), torch.float32)[:, None].expand(-1, 2).contiguous()
        coming = [counts[a][rank] for a in range(world)]
        out = given.new_empty(sum(coming), 2)
        dist.all_to_all_single(out, given, coming, counts[rank], group=group)
        wanted = [drawn(a, sum(counts[a]), torch.float32).split(counts[a])[rank] for a in range(world)]
        assert torch.equal(out, torch.cat(wanted)[:, None].expand(-1, 2))
    dist.destroy_process_group(group)


def test_parts_of_an_exchange_may_differ_and_be_empty(pool):
    pool.run(4, _uneven)


def _lines(rank, world):
    """Much is under way at once, and waited for in another order."""
    group = group_of(rank, world)
    sums = [drawn(rank, count, torch.float32, seed=count) for count in SIZES]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in sums]
    for work in reversed(works):
        work.wait()
    for count, each in zip(SIZES, sums, strict=True):
        assert torch.equal(each, in_order([drawn(r, count, torch.float32, seed=count) for r in range(world)]))
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


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_under_way_together_keeps_its_order(pool, world):
    pool.run(world, _lines)


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


# Those who do not come.


def _without_the_last(rank, world, how):
    group = group_of(rank, world, seconds=0.5 if how == "stops" else 30.0)
    tensor = torch.ones(200_000)
    dist.all_reduce(tensor, group=group)
    if rank < world - 1:
        dist.all_reduce(tensor, group=group)
    elif how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "fails":
        raise ValueError("planted")
    else:
        dist.all_reduce(tensor[:5], group=group)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("is killed", "the process of rank 2 of the group has ended"),
        ("stops", "rank 2 of the group has not come to it within 0.5 s"),
        ("fails", "rank 2 of the group has left"),
        ("is elsewhere", "of the group is at another operation, or has another size for it"),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_not_waited_for(pool, how, said):
    start = time.monotonic()
    with pytest.raises(RankError, match=said) as caught:
        pool.run(3, _without_the_last, how, timeout_s=40)
    assert "did not answer" not in str(caught.value).replace("rank 2 did not answer", ""), "others wait for ever"
    assert time.monotonic() - start < 20


def _is_told_beside_a_slower(rank, world):
    """Rank 0 misses ranks 1 and 2, of which the first is only late; a signal disturbs every sleep of it."""
    group = group_of(rank, world)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
        start = time.monotonic()
        try:
            with pytest.raises(dist.DistBackendError, match="the process of rank 2 of the group has ended"):
                dist.all_reduce(torch.ones(3), group=group)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise ValueError(f"after {time.monotonic() - start:.0f} s")
    if rank == 1:
        time.sleep(2.5)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_rank_is_seen_behind_a_slower_one(pool):
    with pytest.raises(RankError, match=r"ValueError: after [01] s"):
        pool.run(3, _is_told_beside_a_slower, timeout_s=40)


def _closed_beside(rank, world):
    """A thread waits for what does not come while the group is closed."""
    group = group_of(rank, world)
    told = []
    if rank == 0:

        def wait():
            with pytest.raises(dist.DistBackendError, match="the group was closed here"):
                dist.all_reduce(torch.ones(300_000), group=group)
            told.append("closed")

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        group.shutdown()
        waiting.join(10)
    gather("here")
    return told


def test_a_group_is_closed_beside_a_thread_that_waits(pool):
    assert pool.run(2, _closed_beside, timeout_s=30) == [["closed"], []]


def _forked(rank, world):
    """A fork of a rank is none: it ends, and the group goes on."""
    group = group_of(rank, world)
    for work in [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for _ in range(3)]:
        work.wait()
    child = os.fork()
    if child == 0:
        dist.destroy_process_group(group)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.3 * rank)  # so that the other sleeps over it, and sees who has left
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return float(total)


def test_a_fork_of_a_rank_does_not_leave_for_it(pool):
    assert pool.run(2, _forked) == [2.0, 2.0]


def _looks(rank, world):
    group = group_of(rank, world)
    work = dist.all_reduce(total := torch.ones(1), group=group, async_op=True)
    gather("has begun")
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline
    return float(total)


def test_who_only_looks_sees_the_end(pool):
    assert pool.run(3, _looks) == [3.0] * 3


LEAVES = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from superstep.runtime.device import Device
from superstep.runtime.transport import reach
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
group = reach(rank, 2, Device("cpu")).group(range(2), device=Device("cpu"), timeout=timedelta(seconds=30))
works = [dist.all_reduce(torch.ones(6_000_000), group=group, async_op=True) for _ in range(12)]
if rank == 1:
    try:
        [work.wait() for work in works]
    except dist.DistBackendError as error:
        print(error)
"""


def test_a_process_may_end_with_something_under_way(tmp_path):
    store = tmp_path / "store"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", LEAVES]
    both = [
        subprocess.Popen([*command, str(rank), str(store)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    said = [one.communicate(timeout=60)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert said[1] == "shared memory: rank 0 of the group has left.\n"


def _waits(rank, world):
    """A rank that leaves what it started: neither it nor the other hangs."""
    group = group_of(rank, world)
    if rank == 0:
        work = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)  # rank 1 never comes to it
        time.sleep(0.2)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="the group was closed here"):
            work.wait()
    gather("here")
    return "here"


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


def test_a_group_can_be_left_with_something_under_way(pool):
    assert pool.run(2, _waits) == ["here", "here"]


def _left_behind(rank, world):
    def traces():
        files = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)]
        mapped = Path("/proc/self/maps").read_text()
        threads = len(os.listdir("/proc/self/task"))
        return sum("superstep" in name for name in files), mapped.count("memfd:superstep"), threads

    before = traces()
    for _ in range(3):
        group = group_of(rank, world)
        for work in [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for _ in range(4)]:
            work.wait()
        during = traces()
        dist.destroy_process_group(group)
        del group, work
    return before, during, traces()


def _is_open(number):
    with contextlib.suppress(OSError):
        return bool(os.readlink(f"/proc/self/fd/{number}"))
    return False


def test_nothing_is_left(pool):
    folder = set(os.listdir("/dev/shm"))
    for before, during, after in pool.run(2, _left_behind):
        assert during[0] == before[0] + 1
        assert during[1] > before[1]
        assert after == before
    assert set(os.listdir("/dev/shm")) == folder


def _cannot(rank, world):
    with pytest.raises(NotImplementedError, match=r"sums of torch.float16 over shared memory; it has torch.float32"):
        dist.all_reduce(torch.ones(2, dtype=torch.float16), group=(group := group_of(rank, world)))
    with pytest.raises(NotImplementedError, match=r"PRODUCT over shared memory; what it has: sum, max, min"):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.PRODUCT, group=group)
    with pytest.raises(ValueError, match="3 elements of all ranks together; there must be 4"):
        dist.all_gather_single(torch.ones(3), torch.ones(2), group=group)
    with pytest.raises(ValueError, match="must lie in one piece"):
        dist.broadcast(torch.ones(4, 4).t()[:2], group=group, group_src=0)
    with pytest.raises(ValueError, match=r"torch.float64 cannot come out as torch.float32: both must be of one type"):
        dist.all_gather_single(torch.ones(4), torch.ones(2, dtype=torch.float64), group=group)
    with pytest.raises(ValueError, match="4 rows for all ranks together; there must be 3"):
        dist.all_to_all_single(torch.ones(3), torch.ones(4), [2, 2], [2, 2], group=group)
    truth = torch.tensor([True, rank == 0])
    dist.all_reduce(truth, group=group)
    assert truth.view(torch.uint8).tolist() == [1, 1]
    turned = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(turned, group=group)
    dist.barrier(group)
    return turned.tolist()


def test_what_it_has_not_is_refused_by_name(pool):
    assert pool.run(2, _cannot) == [[[0, 6], [2, 8], [4, 10]]] * 2


# Where it cannot be had.


def _reached(rank, world, patches):
    with contextlib.ExitStack() as stack:
        for target, value in patches.items():
            stack.enter_context(mock.patch(f"superstep.runtime.{target}", value))
        there = reach(rank, world, CPU)
        return there.shared is not None, there.describe()


def test_without_a_compiler_ranks_talk_over_gloo_and_say_why(pool, tmp_path):
    patches = {"native.COMPILERS": ("no-such-compiler",), "shared.lane.folder_of": _Elsewhere(tmp_path)}
    for is_shared, said in pool.run(2, _reached, patches):
        assert not is_shared
        assert said.startswith("Gloo (compiling lanes.cpp failed: there is no compiler: none of no-such-compiler")


class _Elsewhere:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, source):
        return self.folder


def _one_cannot(rank, world):
    return _reached(rank, world, {"shared.region._opened": _refused} if rank == 1 else {})


def _refused(offer, rank):
    raise PermissionError


def test_if_one_rank_cannot_share_none_does(pool):
    assert pool.run(3, _one_cannot) == [(False, "Gloo (a rank cannot share memory)")] * 3
    assert pool.run(3, _one_has_none) == [(False, "Gloo (a rank's system has no files without a name)")] * 3


def _one_has_none(rank, world):
    return _reached(rank, world, {"shared.region._offer": _nothing} if rank == 2 else {})


def _nothing():
    return None


def _compiled_once(rank, world, folder):
    compiled = []
    inner = native._compile
    with (
        mock.patch.object(lane, "folder_of", return_value=Path(folder)),
        mock.patch.object(native, "_compile", lambda *args: compiled.append(rank) or inner(*args)),
    ):
        assert reach(rank, world, CPU).shared is not None
    return compiled


def test_one_rank_of_a_host_compiles(pool, tmp_path):
    assert pool.run(3, _compiled_once, str(tmp_path)) == [[0], [], []]
    assert len(list(tmp_path.iterdir())) == 1
    assert pool.run(3, _compiled_once, str(tmp_path)) == [[], [], []]


# Whole steps: over shared memory within two hosts and Gloo between them, and over Gloo alone.

LAYOUTS = [
    {"dp": 4, "zero": 2},
    {"dp": 2, "tp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "zero": 1, "microbatch": 1},
    {"pp": 4, "microbatch": 1},
    {"cp": 2, "tp": 2},
    {"cp": 4, "context": "ulysses"},
]


def _hosts(rank):
    inner = region._offer

    def offer():
        found = inner()
        return replace(found, host=f"host {rank // 2}")

    return mock.patch.object(region, "_offer", offer)


def _proven(rank, world, runs, folder, way):
    verdicts = []
    for run in runs:
        with contextlib.ExitStack() as stack:
            if way == "two hosts":
                stack.enter_context(_hosts(rank))
                assert transport.reach(rank, world, CPU).describe() == "shared memory and Gloo"
            else:
                stack.enter_context(mock.patch.object(close, "build_mesh", partial(build_mesh, transport=GLOO)))
            batches = small.batches(packed=False, tokens=32)
            verdicts.append(prove(World(rank, world, CPU), run, batches, Path(folder), reruns=False))
    return verdicts


@pytest.mark.parametrize("way", ["two hosts", "Gloo alone"])
def test_layouts_compute_the_same_over_other_ways(pool, tmp_path, way):
    runs = []
    for layout in LAYOUTS:
        config = small.config(layers=4, packed=False, **{"microbatch": 2} | layout)
        runs.append(resolve(replace(config, data=replace(config.data, sequence_tokens=32))))
    torch.set_num_threads(1)
    write_reference(runs[0].shape, runs[0].config.train, small.batches(packed=False, tokens=32), tmp_path)
    for run, verdict in zip(runs, pool.run(4, _proven, runs, str(tmp_path), way, timeout_s=200)[0], strict=True):
        assert verdict.compared > 0
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())
