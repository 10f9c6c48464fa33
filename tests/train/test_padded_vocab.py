"""A vocabulary that tp does not divide is padded: the same numbers as on one rank, and no trace of it on disk."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import small
from longer import many_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.launch.ranks import World
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import load_weights
from superstep.model.unit import global_tensors
from superstep.plan.resolution.resolve import resolve
from superstep.plan.sharding.padding import pad_vocab
from superstep.state.checkpoint import read_manifest
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc

VOCAB = 41
"""Of four ranks the third has nine tokens and the last none."""

TOKENS = 32


def config(*, tied=True, exact=False, compute="fp32", **plan):
    found = small.config(layers=2, tied=tied, packed=False, compute=compute, **{"microbatch": 4, **plan})
    return replace(
        found,
        model=replace(found.model, vocab=VOCAB),
        data=replace(found.data, sequence_tokens=TOKENS),
        numerics=replace(found.numerics, exact=exact, exact_chunks=4 if exact else None),
    )


def batches():
    """Batches in which the last token of the vocabulary occurs."""
    return tuple(
        Batch({"tokens": b.tokens_BS.clamp(max=VOCAB - 1)}, b.targets_BS.clamp(max=VOCAB - 1), b.valid_tokens)
        for b in small.batches(packed=False, tokens=TOKENS)
    )


LAYOUTS = {
    2: [
        {"tp": 2},
        {"tp": 2, "tied": False, "sequence_parallel": False},
        {"tp": 2, "tied": False, "recompute": "full"},
        {"tp": 2, "compute": "bf16"},
    ],
    4: [
        {"tp": 4},
        {"tp": 4, "tied": False},
        {"tp": 2, "pp": 2},
        {"tp": 2, "dp": 2, "zero": 3, "tied": False},
        {"tp": 2, "dp": 2, "zero": 1},
    ],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folders = {}
    for tied in (True, False):
        folders[tied] = tmp_path_factory.mktemp(f"tied-{tied}")
        run = resolve(config(tied=tied, dp=1))
        write_reference(run.shape, run.config.train, batches(), folders[tied])
    torch.set_num_threads(threads)
    return folders


def _prove_all(rank, world, cases):
    return [prove(World(rank, world, Device("cpu")), run, batches(), Path(f), reruns=False) for run, f in cases]


@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_layouts_compute_what_one_process_does(pool, references, world):
    cases = [(resolve(config(**plan)), str(references[plan.get("tied", True)])) for plan in LAYOUTS[world]]
    for (run, _), verdict in zip(cases, pool.run(world, _prove_all, cases, timeout_s=240)[0], strict=True):
        assert dict(run.plan.padding) == {"vocab": pad_vocab(VOCAB, run.plan.mesh.tp)}
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())


EXACT = {
    2: [{"tp": 2}, {"tp": 2, "tied": False}, {"dp": 2, "zero": 2}],
    4: [{"tp": 4}, {"tp": 4, "tied": False}, {"tp": 2, "pp": 2, "tied": False}, {"tp": 2, "dp": 2, "zero": 3}],
}


def _write(rank, world, runs, root):
    for tied, run in runs.items():
        folder = Path(root) / str(tied)
        folder.mkdir()
        write_bits(World(rank, world, Device("cpu")), run, batches(), folder, stop=1)


def _prove_exact(rank, world, runs, root, turn):
    """Each goes on from the checkpoint that was left last by a model like it."""
    root, verdicts = Path(root), []
    for number, run in enumerate(runs):
        tied = run.shape.tied
        left = sorted(root.glob(f"left-{tied}-*"))
        leave = root / f"left-{tied}-{turn}{number}"
        relay = Relay(take=left[-1] if left else root / str(tied) / "checkpoint", leave=leave, step=1)
        verdicts.append(prove_exact(World(rank, world, Device("cpu")), run, batches(), root / str(tied), relay))
    return verdicts


@pytest.mark.long
def test_exact_mode_gives_the_bits_of_one_rank_and_checkpoints_go_anywhere(pool, tmp_path):
    """One rank, two, four, and one again, each from what the one before it left."""
    alone = {tied: resolve(config(tied=tied, exact=True, dp=1)) for tied in (True, False)}
    assert alone[True].plan.grain.cells == 8
    pool.run(1, _write, alone, str(tmp_path), timeout_s=200)
    for turn, world in enumerate((2, 4, 1)):
        plans = EXACT.get(world, [{"dp": 1}, {"dp": 1, "tied": False}])
        runs = [resolve(config(exact=True, **plan)) for plan in plans]
        verdicts = pool.run(world, _prove_exact, runs, str(tmp_path), turn, timeout_s=400)[0]
        for plan, verdict in zip(plans, verdicts, strict=True):
            told = [d.describe() for d in (verdict.first, verdict.first_resumed) if d]
            assert verdict.is_proven, (plan, told)
    for checkpoint in tmp_path.glob("left-*"):
        stored = read_manifest(checkpoint).tensors
        tables = {name: found.shape for name, found in stored.items() if "embed_tokens" in name or "lm_head" in name}
        assert set(map(tuple, tables.values())) == {(VOCAB, 32)}
        assert len(tables) == (3 if "True" in checkpoint.name else 6)
    # What samples loads it as it is: there is no token beyond the vocabulary to be drawn.
    model = Decoder(alone[False].shape)
    load_weights(sorted(tmp_path.glob("left-False-*"))[-1], global_tensors(model, units(alone[False].shape)))
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, VOCAB)


def _padding(rank, world, run):
    """The largest number in the padding of weights and moments after two steps, and how many there are."""
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine, largest, count = Engine(run, units(run.shape), mesh), 0.0, 0
    mine = rows(run.plan, mesh)
    for batch in batches():
        engine.train_step(
            microbatches(batch.tokens_BS[mine], batch.targets_BS[mine], run.plan, mesh),
            valid_tokens=batch.valid_tokens,
            lr=1e-2,
        )
    for buffers in (b for unit in engine.buffers.values() for b in unit):
        for slot in buffers.layout.slots:
            for whole in (buffers.full, *buffers.state, buffers.gradient):
                padding = whole[slot.held : slot.stop]
                count += padding.numel()
                largest = max(largest, float(padding.abs().max()) if padding.numel() else 0.0)
    mesh.destroy()
    return largest, count


@pytest.mark.parametrize("exact", [False, True])
def test_padding_stays_zero(pool, exact):
    found = pool.run(2, _padding, resolve(config(tp=2, tied=False, exact=exact)), timeout_s=100)
    assert [largest for largest, _ in found] == [0.0, 0.0]
    assert sum(count for _, count in found) > 0
