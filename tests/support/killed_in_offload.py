"""A rank that is killed, once, while it writes activations to a disk."""

import os
import signal

from superstep.engine.activations.direct_file import DirectFile
from superstep.launch.ranks import World
from superstep.run import rank as ranks
from superstep.run.console import Console
from superstep.run.job import TrainJob

MARK = "killed in an offload"
"""The file of a run's folder that says so."""
WRITES = 250
"""Those of the killed rank before: a step has about 100."""


def rank(world: World, job: TrainJob, console: Console) -> bool:
    """``ranks.rank``; rank 1 is killed between a write and the note that the part is written."""
    mark, write, writes = job.folder.root / MARK, DirectFile.write, []

    def killing(file, part, content):
        write(file, part, content)
        writes.append(part)
        if len(writes) > WRITES and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        DirectFile.write = killing
    return ranks.rank(world, job, console)
