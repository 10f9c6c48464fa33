"""A rank that is lost after the process that ranks are forked from: another such process, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import hurting
import runs
from superstep.cli.main import main
from superstep.monitor.rank_inspector import views_of
from superstep.monitor.status_page import read_beat

pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")]

FLAGS = ["train", "run.toml", "--numerics.exact", "true", "--train.steps", "60", "--train.eval-every", "60",
         "--state.save-every", "60", "--plan.dp", "2"]  # fmt: skip
HURT = ["--state.snapshot-every", "1", "--state.dir", "hurt"]
DEADLINE_S = 120.0


def _losses(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(run, "step")]


def _until(holds, launcher):
    """What it returns once it is true."""
    until_s = time.monotonic() + DEADLINE_S
    while not (found := holds()):
        assert time.monotonic() < until_s
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.005)
    return found


def test_a_rank_that_is_lost_after_the_fork_server_is_recovered_with_the_same_bits(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*FLAGS, "--state.dir", "whole"]) == 0
    command = [sys.executable, "-m", "superstep", *FLAGS, *HURT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        hurt = tmp_path / "hurt"
        _until(lambda: (hurt / "metrics.jsonl").exists() and len(_losses(hurt)) >= 3, launcher)
        ranks = {rank: read_beat(view).process for rank, view in views_of(launcher.pid).items()}
        os.kill(psutil.Process(ranks[1]).ppid(), signal.SIGKILL)
        os.kill(ranks[1], signal.SIGKILL)
        said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, said
    (lost,) = hurting.resumed(hurt)
    assert lost["lost"].startswith("rank 1, ")
    assert _losses(hurt) == _losses(tmp_path / "whole")
    left = [process for process in ranks.values() if psutil.pid_exists(process)]
    assert all(psutil.Process(process).status() == psutil.STATUS_ZOMBIE for process in left), "no rank of before runs"
