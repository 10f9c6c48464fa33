"""A rank that measures little of the machine before its first step: what it does by itself takes longer than most of
the runs of tests, and none of them asks how long a step would take.

Where it is launched it is told by this module's name, so that it measures little in a process of its own as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from superstep.engine.measure import probe_collectives, probe_kernels, probe_machine
from superstep.launch.ranks import World
from superstep.run.console import Console
from superstep.run.job import TrainJob
from superstep.run.rank import rank as whole


@contextmanager
def measuring_little() -> Iterator[None]:
    """Within the block operations are timed three times, and of passes and messages two sizes, which make a line."""
    sizes = {
        "KEPT_BYTES": dict.fromkeys(probe_kernels.KEPT_BYTES, 2**18),
        "SIZES": dict.fromkeys(probe_kernels.SIZES, (2**12, 2**15)),
    }
    messages = {"SIZES": dict.fromkeys(probe_collectives.SIZES, (2**12, 2**16)), "REPEATS": 3}
    gauge = partial(probe_kernels.TimingOptions, budget_s=0.0)
    with (
        mock.patch.multiple(probe_kernels, **sizes),
        mock.patch.multiple(probe_collectives, **messages),
        mock.patch.object(probe_machine, "TimingOptions", gauge),
    ):
        yield


def rank(world: World, job: TrainJob, console: Console) -> bool:
    """As ``superstep.run.rank.rank``."""
    with measuring_little():
        return whole(world, job, console)
