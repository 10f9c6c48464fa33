"""Every layout computes what one device computes."""

import functools
from pathlib import Path

import pytest
import torch

import small
from covering import covering, drawn, meetings
from longer import longer, many_ranks
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """The folder with one-process results for a run, made once for each model and kind of batch."""
    root = tmp_path_factory.mktemp("references")

    def folder(run):
        shape, kind = run.shape, _kind(run)
        found = root / "-".join(map(str, (shape.layers, shape.tied, shape.qk_norm, *kind.values())))
        if not found.exists():
            found.mkdir()
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            write_reference(shape, run.config.train, small.batches(**kind), found)
            torch.set_num_threads(threads)
        return str(found)

    return folder


def _kind(run):
    """The batches of a run."""
    data = run.config.data
    return {"packed": data.packed, "masked": data.is_masked, "sequences": run.config.train.batch_sequences}


def _prove_all(rank, world, cases):
    found = []
    for number, (run, folder) in enumerate(cases):
        batches = small.batches(**_kind(run))
        verdict = prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=number % 5 == 0)
        found.append(verdict)
    return found


def assert_proven(pool, world, runs, references, timeout_s):
    cases = [(run, references(run)) for run in runs]
    verdicts = pool.run(world, _prove_all, cases, timeout_s=timeout_s)[0]
    for run, verdict in zip(runs, verdicts, strict=True):
        assert verdict.compared > 0
        assert verdict.is_proven, (run.config.plan, run.shape.tied, verdict.first and verdict.first.describe())


def _swept(world):
    layers, sequences = {1: (5, 8), 2: (5, 8), 4: (9, 8), 8: (9, 16)}[world]
    return list(layouts(small.config(layers=layers, sequences=sequences), world))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_sweep_has_every_value_of_every_choice(world):
    runs = _swept(world)
    assert {r.plan.schedule for r in runs} >= {"1f1b", "interleaved", "breadth-first", "zb-v"}
    assert {r.plan.recompute for r in runs} == {"none", "selective", "full"}
    if world == 1:
        return
    for axis in ("pp", "dp", "cp", "tp"):
        assert world in {r.plan.mesh.degree(axis) for r in runs if r.plan.mesh.degree(axis) == r.plan.mesh.world}
    assert {r.plan.zero for r in runs} == {0, 1, 2, 3}
    assert {r.plan.context for r in runs if r.plan.mesh.cp > 1} == {"ring", "ulysses"}
    assert {r.plan.schedule for r in runs} >= {"gpipe", "zb-h1"}
    assert {r.shape.tied for r in runs} == {True, False} == {r.config.data.packed for r in runs}
    assert any(r.config.plan.stages for r in runs)
    left = {axis for r in runs for axis, _ in r.config.plan.rules}
    assert left == {"ffn", "vocab"} if world > 2 else left
    if world > 2:
        assert {r.plan.mesh.replicas for r in runs} == {1, 2}


WORLDS = (1, 2, 4, 8)


@functools.cache
def _covering():
    """Not made when the module is imported, which every rank of the pool does."""
    return covering(WORLDS)


def test_the_covering_array_has_every_pair_that_other_draws_have():
    """Twice as many layouts, drawn otherwise, meet in no way that the chosen few do not."""
    chosen = set().union(*(meetings(run) for runs in _covering().values() for run in runs))
    assert set().union(*map(meetings, drawn(WORLDS, 600, seed=1))) <= chosen


@pytest.mark.parametrize("world", many_ranks(WORLDS))
def test_every_pair_of_settings(pool, references, world):
    assert_proven(pool, world, _covering()[world], references, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_layout_that_fits(pool, references, world):
    assert_proven(pool, world, _swept(world), references, timeout_s=3000)


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"tp": 2, "microbatch": 2},
        {"pp": 2, "microbatch": 1, "schedule": "zb-h1"},
        *longer(
            [
                {"dp": 2, "zero": 0},
                {"pp": 2, "microbatch": 2, "recompute": "selective"},
                {"pp": 2, "microbatch": 1, "schedule": "zb-v", "chunks": 2, "recompute": "full"},
            ],
            lambda plan: True,
        ),
    ],
    ids=str,
)
def test_bf16_stays_within_its_tolerance(pool, references, plan):
    run = resolve(small.config(layers=small.layers_for(plan), compute="bf16", packed=False, **plan))
    assert_proven(pool, 2, [run], references, timeout_s=60)


def test_any_split_of_the_batch_gives_the_same_gradient(pool, references):
    runs = [resolve(small.config(layers=2, dp=2, zero=2, microbatch=size, packed=False)) for size in (1, 2, 4)]
    assert_proven(pool, 2, runs, references, timeout_s=60)
