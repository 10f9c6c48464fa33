"""Ranks that can be found and made to hang, and the run that they train."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from superstep.cli.prove.fault_injection import HANG, ranks_of
from superstep.cli.train import job as jobs
from superstep.cli.train.job import TrainJob, launched, prepared_job
from superstep.launch.ranks import World
from superstep.plan.config_io import read_config
from superstep.train.model import resolved

HANGS_S = 100_000


def train(path: Path) -> int:
    """Train, or go on; the exit status."""
    run = resolved(read_config(path))
    assert run.config.data.cache is not None
    with prepared_job(run, lambda *_: Path(run.config.data.cache or "")) as job:
        return 0 if job is None else launched(job, rank) or 0


def rank(world: World, job: TrainJob) -> bool:
    """``jobs.rank``; when it is told to, its main thread sleeps in C and keeps Python's lock."""
    signal.signal(HANG, lambda *_: ctypes.PyDLL(None).sleep(HANGS_S))
    place = ranks_of(job.folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / str(world.rank)).write_text(str(os.getpid()))
    return jobs.rank(world, job)
