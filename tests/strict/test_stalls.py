"""A call that one rank leaves out ends the job once nothing moves any more, long before the group's limit."""

import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from strict_ranks import begin_nccl, run_to_the_end, wait_for_text
from superstep.strict.nccl import stall

pytestmark = pytest.mark.strict

LIMIT_S = 600


def leave_out(rank, world, folder):
    """Rank 0 makes a call alone, the end of which rank 1 waits for."""
    gpu = begin_nccl(rank, world, folder, LIMIT_S)
    x = torch.ones(4, device=gpu)
    dist.all_reduce(x)  # together
    torch.cuda.synchronize()
    stall.STALL_S = 1.0
    if rank == 0:
        dist.all_reduce(x)  # alone
        torch.cuda.synchronize()
    else:
        wait_for_text(folder / "stderr 0", "watchdog")


def test_a_call_that_one_rank_leaves_out_is_named_once_nothing_moves(tmp_path):
    (status, text), _ = run_to_the_end(2, leave_out, tmp_path)
    assert status == -6, text
    assert re.search(
        r"no rank moves any more: call 2 of communicator 0: all_reduce \(\S*test_stalls.py:\d+.*\) waits for rank 1, "
        r"whose last call there is all_reduce of sum of 4 float32 \(\S*test_stalls.py:\d+",
        text,
    )


COMPUTES = "while True: pass"
WAITS = "import time; time.sleep(600)"
WAITS_FOR_ITS_OWN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])"


@pytest.mark.parametrize(
    ("programs", "is_stalled"),
    [
        ([WAITS, WAITS], True),
        ([WAITS, COMPUTES], False),
        ([WAITS, WAITS_FOR_ITS_OWN], False),
    ],
    ids=["all wait", "one computes", "one waits for a process of its own"],
)
def test_a_job_is_stuck_where_all_its_ranks_wait(programs, is_stalled, monkeypatch):
    monkeypatch.setattr(stall, "STALL_S", 1.0)
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        ranks = [psutil.Process(each.pid) for each in started]
        detector, found = stall.StallDetector(), False
        end_s = time.monotonic() + (60 if is_stalled else 4)
        while not found and time.monotonic() < end_s:
            time.sleep(0.1)
            found = detector.is_stalled(ranks)
        assert found == is_stalled
    finally:
        for each in (*(child for rank in ranks for child in rank.children(recursive=True)), *started):
            each.kill()
            each.wait()
