"""A run's bits on one rank, and their comparison with those of layouts, for a pool of ranks."""

from pathlib import Path

import small
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits


def _batches(run):
    """Two: what has no gradient at first has one in the second, and moments and an update by it."""
    return small.batches(packed=False, tokens=run.config.data.sequence_tokens)


def write_run_bits(rank, world, run, folder):
    return str(write_bits(World(rank, world, Device("cpu")), run, _batches(run), Path(folder), stop=1))


def prove_run_bits(rank, world, cases, root):
    """The verdict of each run and folder with bits."""
    verdicts = []
    for number, (run, folder) in enumerate(cases):
        relay = Relay(take=Path(folder) / "checkpoint", leave=Path(root) / f"{world}-{number}", step=1)
        verdicts.append(prove_exact(World(rank, world, Device("cpu")), run, _batches(run), Path(folder), relay))
    return verdicts
