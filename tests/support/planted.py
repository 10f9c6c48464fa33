"""Ranks that train until they are told to leave, in which faults can be planted: each by the name in a file.

now      what is planted at present; every rank looks before each step
begun    which fault a rank is in
free     whoever is kept may go on
"""

import ctypes
import itertools
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import small
from superstep.comm import backend
from superstep.comm.collectives import DONE
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.launch.stack_dump import answering
from superstep.model.axes import units
from superstep.monitor.status_page import HeartbeatWriter, StatusPage
from superstep.plan.config_io import write_config
from superstep.program.instructions import Reduce
from superstep.program.text import write_program
from superstep.train.run_folder.report_status import report_waits
from superstep.train.run_folder.run_paths import RunFolder

RANK = 1
"""Who is hurt."""

UNIT, HELD_UNIT = 2, 1
"""Where. What has taken long before may take long again: so of two that are kept each is elsewhere."""

SKIPPED = Reduce(0)
"""The last sum on its lane, which no other of its size can be taken for."""

SLOW_S, DATA_S, HELD_S = 0.1, 0.05, 15.0


class Planted:
    """Faults of one rank.

    Args:
        place: the folder of the files.
        rank: whose.
        executor: of its engine, a part of which is stood in for.
    """

    def __init__(self, place, rank, executor):
        self._place, self._is_hurt = place, rank == RANK
        self.now, self._done = "", set()
        self._executor, self._issue, executor._issue = executor, executor._issue, self.issue
        self._compute, executor._compute = executor._compute, self.compute

    def compute(self, unit, m, x, **how):
        """What a hook of the user's on this unit would do."""
        if self._is_hurt and (unit, m) == (UNIT, 0):
            if self.now == "slow":
                time.sleep(SLOW_S)
            elif self._begins("hook"):
                self.wait_for_nobody()
        if self._is_hurt and unit == HELD_UNIT and self._begins("held"):
            ctypes.PyDLL(None).usleep(int(1e6 * HELD_S))
        return self._compute(unit, m, x, **how)

    def issue(self, instruction):
        """What a rank would do that takes another way: one sum is left out."""
        if self._is_hurt and instruction == SKIPPED and self._begins("skip"):
            self._executor._flight.reducing[instruction.unit] = DONE
        else:
            self._issue(instruction)

    def batches(self, batch):
        """Without an end; slow to come, where that is planted."""
        for _ in itertools.count():
            if self._is_hurt and self.now == "data":
                time.sleep(DATA_S)
            yield batch

    def wait_for_nobody(self):
        """As a lock does that is taken twice; another thread lets go of it when the test is done."""
        lock = threading.Lock()
        lock.acquire()

        def free():
            while not (self._place / "free").exists():
                time.sleep(0.02)
            lock.release()

        threading.Thread(target=free, daemon=True).start()
        lock.acquire()

    def _begins(self, name):
        if self.now != name or name in self._done:
            return False
        self._done.add(name)
        (self._place / "begun").write_text(name)
        return True


def train_over_gloo(rank, world, run, place):
    """What each rank of the pool does where no memory is shared."""
    with mock.patch.object(backend, "open_shared_region", return_value=(None, "")):
        train(rank, world, run, place)


def train(rank, world, run, place):
    """What each rank of the pool does."""
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    page = StatusPage(f":{rank}")
    heart = answering(HeartbeatWriter(os.dup(page.handle)))
    engine = Engine(run, units(run.shape), mesh, heart=heart)
    folder = RunFolder(root=Path(place))
    planted = Planted(folder.root, rank, engine._executor)
    if rank == 0:
        folder.config.write_text(write_config(run.config))
        folder.program.write_text(write_program(engine.step_program))
    batch = small_batch(run)
    mine = rows(run.plan, mesh)
    parts = microbatches(batch.tokens_BS[mine], batch.targets_BS[mine], run.plan, mesh)
    written = folder.root / f"rank-{rank}.part"
    written.write_text(str(os.getpid()))
    written.rename(folder.root / f"rank-{rank}")
    threading.Thread(target=_leave, args=(folder.root,), daemon=True).start()
    for each in report_waits(heart, planted.batches(parts)):
        planted.now = gather((folder.root / "now").read_text() if rank == 0 else "", str)[0]
        engine.train_step(each, valid_tokens=batch.valid_tokens, lr=1e-3)


def _leave(place):
    while not (place / "leave").exists():
        time.sleep(0.05)
    os._exit(3)


def small_batch(run):
    """One batch of the run's shape."""
    return small.batches(steps=1, sequences=run.config.train.batch_sequences)[0]
