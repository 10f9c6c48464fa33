"""Exact mode: the same bits on every layout, from the start and from any other layout's checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest

import small
from superstep.plan.resolve import resolve
from superstep.runtime.device import Device
from superstep.runtime.launch import World
from superstep.train.prove_exact import Relay, prove_exact, write_bits

pytestmark = pytest.mark.multiproc

TOKENS = 32


def exact(*, compute="fp32", tied=True, **plan):
    """A run in exact mode whose sequences 4 context-parallel ranks can share."""
    config = small.config(layers=4, compute=compute, tied=tied, packed=False, **{"microbatch": 1, **plan})
    return resolve(
        replace(
            config,
            data=replace(config.data, sequence_tokens=TOKENS),
            numerics=replace(config.numerics, exact=True, exact_chunks=8),
        )
    )


def _batches():
    return small.batches(steps=3, packed=False, tokens=TOKENS)


def _write(rank, world, run, folder):
    return write_bits(World(rank, world, Device("cpu")), run, _batches(), Path(folder), stop=1)


def _prove(rank, world, runs, folder, root):
    take = Path(folder) / "checkpoint"
    verdicts = []
    for number, run in enumerate(runs):
        leave = Path(root) / f"{world}-{number}"
        relay = Relay(take=take, leave=leave, step=1)
        verdicts.append(prove_exact(World(rank, world, Device("cpu")), run, _batches(), Path(folder), relay))
        take = leave
    return verdicts


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    """The folder of one rank's bits, made once for each dtype and kind of head."""
    folders = {}

    def folder(compute, tied):
        if (compute, tied) not in folders:
            folders[compute, tied] = tmp_path_factory.mktemp("bits")
            pool.run(1, _write, exact(compute=compute, tied=tied), str(folders[compute, tied]))
        return folders[compute, tied]

    return folder


LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "zero": 3, "recompute": "full"},
    {"pp": 2},
    {"pp": 2, "chunks": 2, "schedule": "breadth-first", "recompute": "selective"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"cp": 2},
    {"cp": 2, "context": "ulysses"},
    {"dp": 2, "zero": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "dp": 2, "zero": 1},
    {"pp": 2, "cp": 2, "context": "ulysses"},
    {"pp": 4},
    {"tp": 4},
    {"cp": 4},
    {"dp": 4, "zero": 3},
]


@pytest.mark.parametrize(("compute", "tied"), [("fp32", True), ("fp32", False), ("bf16", True)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layouts_give_the_same_bits(pool, reference, tmp_path, world, compute, tied):
    folder = reference(compute, tied)
    runs = [exact(compute=compute, tied=tied, **plan) for plan in [{}, *LAYOUTS]]
    runs = [run for run in runs if run.plan.mesh.world == world]
    verdicts = pool.run(world, _prove, runs, str(folder), str(tmp_path), timeout_s=300)[0]
    for run, verdict in zip(runs, verdicts, strict=True):
        told = [d.describe() for d in (verdict.first, verdict.first_resumed) if d]
        assert verdict.is_proven, (run.config.plan, told)
        assert verdict.compared > 3 * 2 * 30_000
