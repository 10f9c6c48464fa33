"""Shared memory, and ranks that do not come, leave, fork or end: nobody waits for them, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longer import longer
from pool import RankError
from shared_groups import group_of
from superstep.comm.objects import gather

pytestmark = pytest.mark.multiproc


def _without_the_last(rank, world, how, seats=None):
    group = group_of(rank, world, seats=seats, seconds=0.5 if how == "stops" else 30.0)
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
        ("is killed", "the process of rank 2 has ended"),
        ("stops", "rank 2 has not come to it within 0.5 s"),
        ("fails", "rank 2 has left"),
        ("is elsewhere", " is at another operation, or has another size for it"),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_not_waited_for(pool, how, said):
    # Who had waited would say that it has not come within 30 s.
    with pytest.raises(RankError, match=said) as caught:
        pool.run(3, _without_the_last, how, timeout_s=40)
    assert "did not answer" not in str(caught.value).replace("rank 2 did not answer", ""), "others wait for ever"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("is killed", "the process of rank 3 has ended"),
        *longer(
            [
                ("stops", "rank 3 has not come to it within 0.5 s"),
                ("fails", "rank 3 has left"),
                ("is elsewhere", "rank [23] is at another operation, or has another size for it"),
            ],
            lambda way: True,
        ),
    ],
)
def test_over_several_hosts_its_neighbours_name_it_by_its_number_among_all(pool, how, said):
    with pytest.raises(RankError, match=f"DistBackendError: shared memory: {said}"):
        pool.run(4, _without_the_last, how, 2, timeout_s=5)


def _is_told_beside_a_slower(rank, world, place):
    """Rank 0 misses ranks 1 and 2, of which the first is only late; a signal disturbs every sleep of it."""
    told = Path(place, "told")
    group = group_of(rank, world)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
        try:
            with pytest.raises(dist.DistBackendError, match="the process of rank 2 has ended"):
                dist.all_reduce(torch.ones(3), group=group)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        told.touch()
        raise ValueError("told before rank 1 came")
    if rank == 1:
        while not told.exists():  # it is late for as long as rank 0 waits
            time.sleep(0.01)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_rank_is_seen_behind_a_slower_one(pool, tmp_path):
    with pytest.raises(RankError, match="ValueError: told before rank 1 came"):
        pool.run(3, _is_told_beside_a_slower, str(tmp_path), timeout_s=40)


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
    gather("here", str)
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


LEAVES = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from superstep.comm.device import Device
from superstep.comm.backend import reach
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
    assert said[1] == "shared memory: rank 0 has left.\n"


def _waits(rank, world):
    """A rank that leaves what it started: neither it nor the other hangs."""
    group = group_of(rank, world)
    if rank == 0:
        work = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)  # rank 1 never comes to it
        time.sleep(0.2)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="the group was closed here"):
            work.wait()
    gather("here", str)
    return "here"


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
    with pytest.raises(NotImplementedError, match=r"sums of torch.int8 over shared memory; it has torch.float32"):
        dist.all_reduce(torch.ones(2, dtype=torch.int8), group=(group := group_of(rank, world)))
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
