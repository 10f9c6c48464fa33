"""Ranks that can be found and made to hang, and the run that they train."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from superstep.cli.launcher import launcher
from superstep.cli.prove.fault_injection import HANG, ranks_of
from superstep.cli.train.terminal import Terminal
from superstep.launch.ranks import World
from superstep.plan.config_io import read_config
from superstep.run import rank as ranks
from superstep.run.console import Console
from superstep.run.job import TrainJob
from superstep.run.launch_ranks import launch
from superstep.run.prepare_job import prepare_job
from superstep.train.weights.model import resolve_config

HANGS_S = 100_000


def train(path: Path) -> int:
    """Train or resume; the exit status."""
    run = resolve_config(read_config(path))
    data = run.config.data.source or run.config.data.cache
    assert data is not None
    with prepare_job(run, lambda *_: Path(data), Terminal(), launcher=launcher()) as job:
        return 0 if job is None else launch(job, Terminal(), rank) or 0


def rank(world: World, job: TrainJob, console: Console) -> bool:
    """``ranks.rank``; on a signal, its main thread sleeps in C and holds the GIL."""
    signal.signal(HANG, lambda *_: ctypes.PyDLL(None).sleep(HANGS_S))
    place = ranks_of(job.folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / str(world.rank)).write_text(str(os.getpid()))
    return ranks.rank(world, job, console)
