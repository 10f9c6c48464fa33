"""How ranks reach each other: what is found, what is said of it, and whole steps over each way."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import small
from longer import longer
from shared_groups import CPU, hosts_of
from superstep.comm import backend
from superstep.comm.backend import GLOO, reach
from superstep.comm.mesh import build_mesh
from superstep.comm.shared_memory import channel, region
from superstep.kernels import compile_cpp
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof import prove_tolerance
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc


def _reached(rank, world, patches):
    with contextlib.ExitStack() as stack:
        for target, value in patches.items():
            stack.enter_context(mock.patch(f"superstep.{target}", value))
        there = reach(rank, world, CPU)
        return there.shared is not None, there.describe()


def test_without_a_compiler_ranks_talk_over_gloo_and_say_why(pool, tmp_path):
    patches = {
        "kernels.compile_cpp.COMPILERS": ("no-such-compiler",),
        "comm.shared_memory.channel.folder_of": _Elsewhere(tmp_path),
    }
    for is_shared, said in pool.run(2, _reached, patches):
        assert not is_shared
        assert said.startswith("Gloo (compiling lanes.cpp failed: there is no compiler: none of no-such-compiler")


class _Elsewhere:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, source):
        return self.folder


def _one_cannot(rank, world):
    return _reached(rank, world, {"comm.shared_memory.region._open_offer": _refused} if rank == 1 else {})


def _refused(offer, rank):
    raise PermissionError


def test_if_one_rank_cannot_share_none_does(pool):
    assert pool.run(3, _one_cannot) == [(False, "Gloo (a rank cannot share memory)")] * 3
    assert pool.run(3, _one_has_none) == [(False, "Gloo (a rank's system has no files without a name)")] * 3


def _one_has_none(rank, world):
    return _reached(rank, world, {"comm.shared_memory.region._offer": _nothing} if rank == 2 else {})


def _nothing():
    return None


def _compiled_once(rank, world, folder):
    compiled = []
    inner = compile_cpp.compile_file
    with (
        mock.patch.object(channel, "folder_of", return_value=Path(folder)),
        mock.patch.object(compile_cpp, "compile_file", lambda *args: compiled.append(rank) or inner(*args)),
    ):
        assert reach(rank, world, CPU).shared is not None
    return compiled


def test_one_rank_of_a_host_compiles(pool, tmp_path):
    assert pool.run(3, _compiled_once, str(tmp_path)) == [[0], [], []]
    assert len(list(tmp_path.iterdir())) == 1
    assert pool.run(3, _compiled_once, str(tmp_path)) == [[], [], []]


@pytest.mark.parametrize(
    ("hosts", "ranks", "wanted"),
    [
        ((0, 0, 2, 2), range(4), ((0, 1), (2, 3))),
        ((0, 0, 0, 3, 3, 3), (0, 2, 3, 5), ((0, 2), (3, 5))),
        ((0, 0, 2, 2), (0, 2), ()),  # one of each: nothing to sum in memory
        ((0, 0, 0, 3), range(4), ()),  # not as many
        ((0, 1, 0, 1), range(4), ()),  # whose parts would lie apart
        ((0, 0, 0, 0), range(4), ()),
    ],
)
def test_a_group_over_hosts_has_two_levels_where_each_has_as_many_ranks_in_a_row(hosts, ranks, wanted):
    found = region.Region(os.memfd_create("hosts"), hosts, 0, None)
    assert found.by_host(ranks) == wanted


# Whole steps: within two hosts and between them, and over Gloo alone.

LAYOUTS = [
    {"dp": 2, "tp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "zero": 1, "microbatch": 1},
    {"cp": 2, "tp": 2},
    {"dp": 4, "zero": 2},
    {"pp": 4, "microbatch": 1},
    {"cp": 4, "context": "ulysses"},
    {"cp": 4},
]


def _proven(rank, world, runs, root, way):
    verdicts = []
    for run in runs:
        with contextlib.ExitStack() as stack:
            if way == "two hosts":
                stack.enter_context(hosts_of(rank, 2))
                assert backend.reach(rank, world, CPU).describe() == "shared memory and Gloo"
            else:
                stack.enter_context(
                    mock.patch.object(prove_tolerance, "build_mesh", partial(build_mesh, transport=GLOO))
                )
            batches, folder = small.batches(packed=False, tokens=32), Path(root) / str(run.shape.layers)
            verdicts.append(prove(World(rank, world, CPU), run, batches, folder, reruns=False))
    return verdicts


WAYS = [("two hosts", 4), *longer([("two hosts", 7), ("Gloo alone", 7)], lambda way: True)]
"""Each with so many of the layouts, of which the first three have every axis, and the next a group of both levels."""


@pytest.mark.parametrize(("way", "count"), WAYS)
def test_layouts_compute_the_same_over_other_ways(pool, tmp_path, way, count):
    runs = []
    for layout in LAYOUTS[:count]:
        config = small.config(layers=small.layers_for(layout), packed=False, **{"microbatch": 2} | layout)
        runs.append(resolve(replace(config, data=replace(config.data, sequence_tokens=32))))
    torch.set_num_threads(1)
    for shape in {run.shape for run in runs}:
        folder = tmp_path / str(shape.layers)
        folder.mkdir()
        write_reference(shape, runs[0].config.train, small.batches(packed=False, tokens=32), folder)
    for run, verdict in zip(runs, pool.run(4, _proven, runs, str(tmp_path), way, timeout_s=200)[0], strict=True):
        assert verdict.compared > 0
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())
