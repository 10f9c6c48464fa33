"""The bytes of a run of reinforcement learning are known before it begins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import reinforced
from superstep.comm.device import Device
from superstep.cost.program.memory.communicators import PAIR_BYTES, communicator_bytes
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.model.files.hf import open_weights
from superstep.plan.config import LoraConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.build_engine import open_both
from superstep.train.weights.checkpoint_files import files_beside_start
from superstep.tune.rl.disaggregated import disaggregated
from superstep.tune.rl.job import RlJob, serve_of, with_room
from superstep.tune.rl.memory_budget import pages_apart, pages_for, sizes_of
from superstep.tune.rl.policy_trainer import PolicyTrainer


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return reinforced.start(tmp_path_factory.mktemp("start"))


def held(rank: int, size: int, job: RlJob) -> tuple[int, int, int, int]:
    """Bytes of the tensors that a rank has: its trainer's, its sampler's weights and keys; and of a snapshot."""
    trainer = PolicyTrainer(
        World(rank, size, Device("cpu")), job.run, job.folder, files_beside_start(job.run, job.start)
    )
    trainer.start(None, job.start)
    ours = trainer._engine.bytes()
    trained = ours.params + ours.gradients + ours.optimizer
    if job.rl.kl_coef:
        trainer.keep_reference(job.start)
        beside_it = trainer._reference.bytes()
        assert (beside_it.gradients, beside_it.optimizer) == (0, 0), "it takes no step"
        trained += 0 if job.run.config.lora else beside_it.params  # which it shares
    folder = trainer.publish_version(0, job.folder.root / "weights")
    _, steward = open_both(
        job.start if job.run.config.lora else folder, replace(serve_of(job.run, job.rollout), tp=1, dp=1)
    )
    memory = steward.model.party.memory
    weights = sum(held.values.nbytes for held in memory._served.params.values())
    keys = memory._store.keys.nbytes + memory._store.values.nbytes
    written = [open_weights(file) for file in folder.glob("*.safetensors")]
    snapshot = sum(tensors[name][:].nbytes for tensors in written for name in tensors)
    if job.run.config.lora:  # as they were written
        weights += snapshot
    trainer.close()
    return trained, weights, keys, snapshot


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("exact", "rl", "plan"),
    [
        (True, {}, {}),
        (False, {"kl_coef": 0.1}, {}),
        (True, {"kl_coef": 0.1}, {"dp": 2, "zero": 2}),
        (False, {"kl_coef": 0.1}, {"lora": LoraConfig(rank=4)}),
    ],
    ids=["exact", "fast", "zero", "adapters"],
)
def test_what_is_predicted_is_what_is_held(pool, start, tmp_path, exact, rl, plan):
    job = reinforced.job(tmp_path / "run", start, exact=exact, rl=rl, **plan)
    serve = serve_of(job.run, job.rollout)
    pages = pages_for(job.run, serve, 1 << 30)
    sizes = sizes_of(job.run, serve, job.rl, pages=pages, gives_back=False)
    found = max(pool.run(plan.get("dp", 1), held, job))
    predicted = (sizes.training, sizes.weights, sizes.keys, sizes.snapshot)
    assert found == pytest.approx(predicted, rel=0.05)


def test_a_swap_that_has_no_room_is_refused_beforehand(start, tmp_path):
    job = reinforced.job(tmp_path / "run", start)

    def asked(run: Resolved, free_bytes: int, pages: int | None, requests: int = 64) -> int | None:
        rollout = replace(job.rollout, pages=pages, requests=requests)
        return with_room(run, job.rl, rollout, job.program, free_bytes, gives_back=False).pages

    assert asked(job.run, 1 << 30, 40) == 40
    assert asked(job.run, 1 << 30, None) == 64 * 96 // 16
    with pytest.raises(
        ConfigError, match=r"'take v0' needs [\d,]+ bytes of the ranks, .*fewer rollout.pages|'swap sam"
    ):
        asked(job.run, 4_000_000, 100_000)
    with pytest.raises(ConfigError, match=r"rollout.placement = 'shared': 'train s0' needs .* smaller plan.microbatch"):
        asked(job.run, 100_000, 6, requests=1)


def test_ranks_apart_that_have_no_room_are_refused_beforehand(start, tmp_path, monkeypatch):
    """The trainer takes its memory first, and the samplers share what it leaves; the disk holds what they take."""
    job = reinforced.job(tmp_path / "run", start, rollout={"placement": "apart", "ranks": 2}, dp=2)
    serve = serve_of(job.run, job.rollout)
    sizes = sizes_of(job.run, serve, job.rl, pages=40, gives_back=False)
    trainers = 2 * (sizes.training + sizes.step)
    samplers = 2 * (sizes.weights + sizes.answering + sizes.keys)

    def pages(free_bytes: int, asked: int | None = None) -> int:
        return pages_apart(job.run, replace(serve, pages=asked), job.rl, job.program, free_bytes)

    assert pages(1 << 30) == 64 * 96 // 16
    assert pages(trainers + samplers, 40) == 40
    with pytest.raises(ConfigError, match=r"'take v0' needs [\d,]+ bytes of the sampler, .* rollout.pages"):
        pages(trainers + samplers - 2, 40)
    with pytest.raises(ConfigError, match=r"'apart': 'train s0' needs [\d,]+ bytes of the trainer, .*microbatch"):
        pages(trainers - 2)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=sizes.snapshot * 2 - 1))
    with pytest.raises(ConfigError, match=r"state.dir = '.*run' has [\d,]+ bytes left, and the snapshots that"):
        reinforced.job(tmp_path / "run", start, rollout={"placement": "apart"})
    reinforced.job(tmp_path / "run", start, lag=0)  # one at a time


def test_on_a_gpu_communicators_need_room_too(start, tmp_path, monkeypatch):
    """Trainers of two ranks have three groups of NCCL; a sampler that is alone has none."""
    monkeypatch.setattr(disaggregated, "gather", lambda value, form: [value])
    job = reinforced.job(tmp_path / "run", start, rollout={"placement": "apart", "ranks": 2}, dp=2)
    serve = serve_of(job.run, job.rollout)
    pages = pages_for(job.run, serve, 1 << 40)
    sizes = sizes_of(job.run, serve, job.rl, pages=pages, gives_back=True)
    trainer = sizes.training + sizes.step + max(communicator_bytes(job.run.plan))
    assert trainer > 3 * PAIR_BYTES

    def room(who: str, free_bytes: int) -> int | None:
        gpu = SimpleNamespace(kind="cuda", free_bytes=lambda ranks: free_bytes)
        return disaggregated.require_own_room(SimpleNamespace(device=gpu), job, who)

    room("trainer", trainer)
    with pytest.raises(ConfigError, match=r"'train s0' needs [\d,]+ bytes of the trainer"):
        room("trainer", trainer - 1)
    assert room("sampler", 1 << 30)
