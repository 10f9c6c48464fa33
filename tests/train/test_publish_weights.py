"""One process group trains and serves in turn: snapshots of running trainers, memory given back and taken again."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches
from superstep.errors import StateError
from superstep.model.axes import units
from superstep.model.files.hf import FILE, open_weights
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.resolution.resolve import resolve
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_both
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.config import ServeConfig
from superstep.serve.files.weights import MARK, version_of
from superstep.serve.load_rank import load_rank
from superstep.serve.scheduling.request import Sampling
from superstep.state.checkpoint import save
from superstep.state.manifest import Position
from superstep.train.weights.model import tensor_shapes
from superstep.train.weights.publish_weights import publish

CPU = Device("cpu")
HEAD_OF_RANK_1 = "model.layers.1.self_attn.q_proj.weight"


class Trainer:
    """A rank of a run, and what a session of it would do."""

    def __init__(self, rank, world, run, mesh):
        self.run, self.mesh = run, mesh
        self.peers = RankPeers(rank, world)
        self.engine = Engine(run, units(run.decoder), mesh)
        self.shapes = tensor_shapes(self.engine)

    def step(self, batch):
        parts = microbatches(batch.tokens_BS, batch.targets_BS, self.run.plan, self.mesh, batch.starts_BS)
        self.engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=0.5)

    def publish(self, root):
        beside = {"config.json": json.dumps(to_hf_config(self.run.shape))}
        return publish(self.engine, root, self.peers, shapes=self.shapes, position=Position(), beside=beside, keep=9)


class Serving:
    """A server on the same ranks: rank 0 asks, the other follows for as long as it does."""

    def __init__(self, rank, mesh, folder, serve):
        self.rank, self.group = rank, mesh.tp
        if rank:
            self.mine = load_rank(folder, serve, rank, mesh.tp, CPU)
        else:
            self.engine, self.steward = open_both(folder, serve, tp=mesh.tp)

    def do(self, act):
        """On rank 0 what some work returns."""
        if self.rank:
            follow(self.mine.forward, self.group, CPU, self.mine.party)
            return None
        try:
            return act(self.engine, self.steward)
        finally:
            self.engine.end()

    def says(self):
        return self.do(lambda engine, steward: words(engine))


def words(engine):
    asked = Sampling(max_tokens=6, temperature=0, ignore_eos=True)
    return [[(told.token, told.logprob) for told in one.tokens] for one in generate(engine, [[1, 2, 3], [7]], asked)]


def refused(path):
    def act(engine, steward):
        with pytest.raises(StateError) as error:
            steward.swap(path)
        return str(error.value), words(engine)

    return act


def _job(rank, world, run, root, is_exact):
    root = Path(root)
    mesh = build_mesh(run.plan, rank, CPU, timeout=timedelta(seconds=60))
    trainer, first = Trainer(rank, world, run, mesh), small.batches(steps=2)
    trainer.step(first[0])
    one = trainer.publish(root / "snapshots")
    found = {"one": one}
    save(
        root / "step-000001",
        trainer.engine.pieces(("weight",)),
        Position(),
        trainer.peers,
        tensors={"weight": trainer.shapes},
        beside={},
    )
    serve = ServeConfig(compute="fp32", exact=is_exact, tp=world, context_tokens=16, page_tokens=4)
    serving = Serving(rank, mesh, one.path, serve)

    asleep = trainer.engine.sleep(root if is_exact else None)
    held = trainer.engine.bytes()
    found["held"] = held.params + held.gradients + held.optimizer + held.transient
    found["first"] = serving.says()
    serving.do(lambda engine, steward: steward.sleep())
    asleep.wake()
    trainer.step(first[1])
    two = trainer.publish(root / "snapshots")
    found["woken"] = serving.do(lambda engine, steward: steward.wake(two.path))
    found["second"] = serving.says()

    never = Trainer(rank, world, run, mesh)
    for batch in first:
        never.step(batch)
    found["never slept"], found["two"] = never.publish(root / "other").version, two
    found["fresh"] = Serving(rank, mesh, two.path, serve).says()

    bad = root / "bad"
    if rank == 0:
        bad.mkdir()
        tensors = load_file(one.path / FILE)
        tensors[HEAD_OF_RANK_1][-1, 0] = float("inf")  # in the part of rank 1 alone
        save_file(tensors, bad / FILE, {"format": "pt"})
    found["refused"] = serving.do(refused(bad))
    found["back"] = serving.do(lambda engine, steward: (steward.swap(one.path), words(engine)))
    mesh.destroy()
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "is_exact", [pytest.param(True, id="exact"), pytest.param(False, id="fast", marks=pytest.mark.slow)]
)
def test_a_group_of_ranks_trains_and_serves_in_turn(pool, tmp_path, is_exact):
    config = small.config(layers=2, tp=2)
    run = resolve(replace(config, numerics=replace(config.numerics, exact=is_exact, exact_chunks=8)))
    found, other = pool.run(2, _job, run, str(tmp_path), is_exact)
    one, two = found["one"], found["two"]
    assert one == other["one"]
    assert found["held"] == other["held"] == 0
    assert one.version == version_of(open_weights(one.path)) == version_of(open_weights(tmp_path / "step-000001"))
    assert two.version == found["never slept"] == found["woken"] != one.version
    assert found["second"] == found["fresh"] != found["first"]
    why, after = found["refused"]
    assert f"{HEAD_OF_RANK_1} holds values that are no finite numbers in float32" in why
    assert after == found["second"]
    assert found["back"] == (one.version, found["first"])
    assert not list((tmp_path / "snapshots").glob(".unfinished*"))
    assert (one.path / MARK).is_file()
