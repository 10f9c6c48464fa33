"""The pool of ranks: answers by rank, failures as text, and processes that are used again."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from pool import Pool, RankError

pytestmark = pytest.mark.multiproc


def summed(rank: int, world: int, factor: float) -> tuple[float, int, int]:
    total = torch.tensor(rank * factor)
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads(), os.getpid()


def failing(rank: int, world: int) -> None:
    dist.barrier()  # all are connected: what follows is this rank's doing alone
    if rank == 1:
        raise ValueError("a planted fault")
    dist.barrier()


def hanging(rank: int, world: int) -> None:
    dist.barrier()  # all are connected: what follows is this rank's doing alone
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def dying(rank: int, world: int) -> None:
    dist.barrier()  # all are connected: what follows is this rank's doing alone
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_ranks_answer_in_order_and_are_used_again(pool: Pool):
    first = pool.run(3, summed, 2.0)
    second = pool.run(2, summed, 2.0)
    assert [total for total, _, _ in first] == [6.0, 6.0, 6.0]
    assert [total for total, _, _ in second] == [2.0, 2.0]
    assert {threads for _, threads, _ in first} == {1}
    assert [pid for _, _, pid in first[:2]] == [pid for _, _, pid in second]


def test_a_fault_names_its_rank_and_the_next_run_works(pool: Pool):
    with pytest.raises(RankError, match=r"(?s)^rank 1 raised.*a planted fault"):
        pool.run(2, failing)
    assert pool.run(2, summed, 1.0)[0][0] == 1.0


def test_a_hang_shows_where_and_the_next_run_works(pool: Pool):
    pool.run(2, summed, 1.0)  # the ranks have started
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 did not answer.*in hanging"):
        pool.run(2, hanging, timeout_s=2.0)
    assert time.monotonic() - start < 20
    assert pool.run(2, summed, 1.0)[0][0] == 1.0


def test_a_dead_rank_is_named_and_replaced(pool: Pool):
    before = pool.run(2, summed, 1.0)
    with pytest.raises(RankError, match="rank 1 died with exit status -9"):
        pool.run(2, dying)
    after = pool.run(2, summed, 1.0)
    assert after[0][0] == 1.0
    assert after[1][2] != before[1][2]


def test_a_world_beyond_the_pool_is_refused(pool: Pool):
    with pytest.raises(ValueError, match="size of the pool"):
        pool.run(9, summed, 1.0)
