"""A rank that ends while others call: the first call that needs it is an error with its line, and no other one is."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from strict_ranks import begin_nccl, device_module, run_to_the_end, wait_for_text

pytestmark = pytest.mark.strict

TIME_S = 60
LIMIT_S = 2
"""Of a call whose peer does not come."""


def leave_early(rank, world, folder):
    """Rank 0 makes a call more than rank 1, which ends."""
    gpu = begin_nccl(rank, world, folder, TIME_S)
    x = torch.ones(4, device=gpu)
    dist.all_reduce(x)  # of both
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(x)  # one too many
        torch.cuda.synchronize()


def test_a_collective_that_a_rank_no_longer_makes_names_that_rank(tmp_path):
    (status, text), (other, _) = run_to_the_end(2, leave_early, tmp_path)
    assert (status, other) == (1, 0), text
    last, extra = (
        rf"\(\S*test_members_that_leave.py:{line_number(text)}.*\)" for text in ("# of both", "# one too many")
    )
    why = rf"rank 1, which has left it and whose last call there is all_reduce of sum of 4 float32 {last}"
    assert re.search(rf"CollectiveError: call 2 of communicator \S+: all_reduce {extra} waits for {why}", text), text


def wait_for_a_lost_rank(rank, world, folder):
    """Rank 0 waits for rank 1, which ends, and behind it for rank 2, which never calls; its host looks at neither."""
    gpu = begin_nccl(rank, world, folder, TIME_S)
    store = dist.distributed_c10d._get_default_store()
    for peer in (1, 2):  # the first transfers keep their hosts
        if rank == 0:
            dist.recv(torch.ones(4, device=gpu), peer)
        elif rank == peer:
            dist.send(torch.ones(4, device=gpu), 0)
    torch.cuda.synchronize()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S), dist.group.WORLD)
    if rank == 0:
        works = [dist.irecv(torch.ones(4, device=gpu), peer) for peer in (1, 2)]  # of both peers
        store.set("called", "yes")
        while any("runs call" in task for task in device_module().under_way()):
            time.sleep(0.01)
        time.sleep(2 * LIMIT_S)
        works[0].wait()
        torch.cuda.synchronize()
    elif rank == 1:
        store.wait(["called"], timedelta(seconds=TIME_S))
    else:
        wait_for_text(folder / "stderr 0", "call 3")


def test_no_call_behind_one_that_failed_is_called_late(tmp_path):
    (status, text), *_ = run_to_the_end(3, wait_for_a_lost_rank, tmp_path)
    assert status == 1, text
    assert "watchdog" not in text
    assert re.search(r"CollectiveError: call 3 of communicator \S+: recv .* waits for rank 1, which has left it", text)


def line_number(text):
    """Where this file first has a text."""
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)
