"""Commands whose ranks are launched on emulated GPUs: what was observed on each GPU, and what is planted in a rank.

Each function here is a worker of ``superstep.launch.ranks``, in the place of a command's own.
"""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest

import measured_little
import runs
from strict_ranks import device_module
from superstep.cli.measure import measure_rank
from superstep.comm.objects import gather
from superstep.engine.flat import snapshots
from superstep.engine.measure import probe_kernels
from superstep.engine.step_update import StepUpdate
from superstep.strict.load import configure
from superstep.strict.monitor import Monitor, Report
from superstep.strict.settings import Settings

SETTINGS = Settings(devices=8, device_bytes=8 << 30)
"""NCCL's buffers are planned for, a gigabyte or two."""

DIES_AFTER = 3
"""Steps that ``rank_that_dies`` has done."""


def rank(world, job, console):
    """As ``superstep.run.rank.rank``, and leaves in the run's folder what was observed on the rank's GPU."""
    configure(device_module(), SETTINGS)
    monitor = Monitor(world.device.index)
    is_stopped = measured_little.rank(world, job, console)
    report = monitor.report()
    told = {"races": dict(report.races), "contexts": sorted(report.contexts)}
    (job.folder.root / f"gpu-{world.rank}.json").write_text(json.dumps(told))
    return is_stopped


def rank_whose_copies_choose_no_gpu(world, job, console):
    """The thread that copies the state keeps the GPU that a thread begins with."""

    def unchosen(threads, name, initializer):
        return ThreadPoolExecutor(threads, name)

    with mock.patch.object(snapshots, "ThreadPoolExecutor", unchosen):
        return rank(world, job, console)


def rank_that_dies(world, job, console):
    """Rank 1 is killed within its fourth step, while the others wait for what it should send. Once."""
    update = StepUpdate.run

    def dies(step, *args):
        if step.optimizer.steps == DIES_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(step, *args)

    if world.rank == 1 and job.recovered is None:
        StepUpdate.run = dies
    return rank(world, job, console)


def measured(world, *args):
    """As ``superstep measure`` does it, of little; and no rank has a race or uses another one's GPU. The clock makes
    of a CPU's seconds those of a GPU: rates that no machine has are refused.
    """
    monitor = Monitor(world.device.index)
    quicker = partial(probe_kernels.TimingOptions, clock=lambda: time.perf_counter() / 1000)
    with measured_little.measuring_little(), mock.patch.object(measure_rank, "TimingOptions", quicker):
        found = measure_rank.measure_rank(world, *args)
    reports = gather(monitor.report(), Report)
    assert [(each.races, each.contexts) for each in reports] == [({}, {rank}) for rank in range(world.size)]
    return found


def reports(folder, world):
    """Of each rank the races, and the GPUs that it has used."""
    told = [json.loads((folder / f"gpu-{number}.json").read_text()) for number in range(world)]
    return [(each["races"], each["contexts"]) for each in told]


def clean(world):
    """What is reported where nothing is wrong."""
    return [({}, [number]) for number in range(world)]


def steps(folder):
    """Of each step its number, loss and norm."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(folder, "step")]


def assert_near(folder, other):
    """Losses and norms of two runs, and the losses on the held-out text."""
    ours, theirs = steps(folder), steps(other)
    assert [step for step, *_ in ours] == [step for step, *_ in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    held_out = [[line["loss"] for line in runs.events(each, "evaluated")] for each in (folder, other)]
    assert held_out[0]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
