"""NCCL's branches on Gloo: no channel is used first within a step, and every layout computes the right numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import small
from longer import first_few
from nccl_on_gloo import nccl_on_gloo
from pool import RankError
from superstep.comm.backend import Transport
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.resolve import resolve
from superstep.program.p2p_setup import routes
from superstep.train.proof import prove_tolerance
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc

RERUN_EVERY = 5
"""Layouts of which one is run twice."""


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The folder with one-process results for a run."""
    found = {}

    def folder(run):
        key = (run.shape, run.config.data, run.config.train.batch_sequences)
        if key not in found:
            found[key] = tmp_path_factory.mktemp("reference")
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            write_reference(run.shape, run.config.train, _batches(run), found[key])
            torch.set_num_threads(threads)
        return str(found[key])

    return folder


def _batches(run):
    data = run.config.data
    return small.batches(packed=data.packed, sequences=run.config.train.batch_sequences, tokens=data.sequence_tokens)


def _prove(rank, world, cases, patience_s=20.0):
    """The verdict of each case, its first uses of channels as this rank saw them, and its transfers."""
    found = []
    for number, (run, folder) in enumerate(cases):
        with nccl_on_gloo(prove_tolerance, patience_s=patience_s) as wire:
            here = World(rank, world, Device("cpu"))
            verdict = prove(here, run, _batches(run), Path(folder), reruns=number % RERUN_EVERY == 0)
        found.append((verdict, wire.first_uses, wire.transfers))
    return found


def assert_proven(pool, world, runs, references, timeout_s):
    by_rank = pool.run(world, _prove, [(run, references(run)) for run in runs], timeout_s=timeout_s)
    for number, run in enumerate(runs):
        verdict = by_rank[0][number][0]
        assert verdict.compared > 0
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())
        uses = [use for rank in by_rank for use in rank[number][1]]
        assert all(use.is_ahead for use in uses), run.config.plan
        # Each channel of each pipeline column once for each mesh, from both ends; then the steps use them.
        mesh, meshes = run.plan.mesh, 2 if number % RERUN_EVERY == 0 else 1
        assert len(uses) == meshes * 2 * len(routes(run.plan.placement)) * mesh.dp * mesh.cp * mesh.tp, run.config.plan
        assert (sum(rank[number][2] for rank in by_rank) > len(uses)) == (mesh.pp > 1)


# What NCCL does otherwise: sums and gathers of flat buffers and of sequences, and channels, both ways along a pipeline.
FEW = {
    2: [
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 1, "ep": 2, "experts": 4},
        {"tp": 2, "microbatch": 2, "sequence_parallel": True},
        {"cp": 2, "context": "ring"},
        {"tp": 2, "exact": True, "microbatch": 2},
        {"pp": 2, "microbatch": 1, "schedule": "1f1b"},
        {"pp": 2, "microbatch": 4, "schedule": "zb-v", "chunks": 2},
        {"dp": 2, "zero": 0},
        {"tp": 2, "zero": 3, "experts": 4},
        {"cp": 2, "zero": 2, "exact": True, "microbatch": 2},
        {"pp": 2, "microbatch": 1, "schedule": "gpipe"},
        {"pp": 2, "microbatch": 2, "schedule": "interleaved", "chunks": 2},
        {"pp": 2, "microbatch": 2, "schedule": "breadth-first", "chunks": 2, "recompute": "full"},
    ],
    4: [
        {"pp": 2, "dp": 2, "zero": 2, "microbatch": 1, "schedule": "gpipe"},
        {"pp": 2, "tp": 2, "microbatch": 1, "schedule": "zb-v", "chunks": 2},
        {"pp": 4, "microbatch": 2, "schedule": "zb-h1"},
        {"dp": 4, "zero": 1, "replicas": 2},
    ],
}


def _run(*, experts=None, exact=False, **plan):
    config = small.config(layers=small.layers_for(plan), **plan)
    if experts is not None:
        config = replace(config, model=replace(config.model, experts=experts, ffn=24))
    if exact:
        config = replace(config, numerics=replace(config.numerics, exact=True, exact_chunks=4))
    return resolve(config)


@pytest.mark.parametrize(("world", "part"), first_few(FEW, {2: 7}))
def test_a_few_layouts_compute_what_one_device_does(pool, references, world, part):
    assert_proven(pool, world, [_run(**plan) for plan in FEW[world][part]], references, timeout_s=300)


def _swept(world):
    layers, sequences = {2: (5, 8), 3: (7, 12), 4: (9, 8), 6: (13, 24)}[world]
    config = small.config(layers=layers, sequences=sequences)
    if world % 3 == 0:  # what three tp and three cp ranks can share
        model = replace(config.model, width=24, heads=6, kv_heads=6, ffn=48, vocab=66)
        config = replace(config, model=model, data=replace(config.data, sequence_tokens=24))
    return list(layouts(config, world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_every_layout_computes_what_one_device_does(pool, references, world):
    assert_proven(pool, world, _swept(world), references, timeout_s=3000)


def _prove_lazily(rank, world, cases):
    with mock.patch.object(Transport, "connect_channel", return_value=None):
        return _prove(rank, world, cases, patience_s=3.0)


@pytest.mark.long
def test_a_step_whose_channels_are_made_by_their_first_uses_hangs(pool, references):
    run = _run(pp=2, microbatch=1, schedule="gpipe")
    with pytest.raises(RankError, match=r"CrossedError: rank 0 waits on \(0, 1\) for a peer that does not come"):
        pool.run(2, _prove_lazily, [(run, references(run))])
