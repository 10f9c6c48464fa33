"""The engine beside PyTorch's own DDP, fully_shard, tensor parallel and pipelining: the same losses and norms."""

from datetime import timedelta

import pytest
import torch

from bench.peers import PeerJob, initial_weights, random_batches, run
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.model.axes import units
from superstep.numerics.loss import IGNORE
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve

pytestmark = pytest.mark.multiproc

LONG = pytest.mark.long
STEPS, SEQUENCES, TOKENS, SEED = 3, 8, 32, 1
RATES = (1e-3, 5e-4, 1e-3)


def _both(rank, world, plan, peer, tied):
    config = RunConfig(
        model=ModelConfig(name="tiny", layers=3, tied=tied),
        data=DataConfig(sequence_tokens=TOKENS),
        train=TrainConfig(batch_sequences=SEQUENCES, seed=SEED),
        plan=PlanConfig(microbatch=2, **plan),
    )
    resolved = resolve(config, world)
    batches = random_batches(resolved.shape, STEPS, SEQUENCES, TOKENS, padded=True)
    job = PeerJob(
        shape=resolved.shape,
        weights=initial_weights(resolved.shape, seed=SEED),
        batches=batches,
        microbatch=2,
        lr=RATES,
        **peer,
    )
    theirs = run(rank, world, job)
    mesh = build_mesh(resolved.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(resolved, units(resolved.shape), mesh)
    ours = []
    for (tokens, targets), lr in zip(batches, RATES, strict=True):
        mine = rows(resolved.plan, mesh)
        ours.append(
            engine.train_step(
                microbatches(tokens[mine], targets[mine], resolved.plan, mesh),
                valid_tokens=int((targets != IGNORE).sum()),
                lr=lr,
            )
        )
    mesh.destroy()
    return [r.loss for r in ours], [r.grad_norm for r in ours], theirs.losses, theirs.grad_norms


@pytest.mark.parametrize(
    ("plan", "peer", "tied"),
    [
        ({"dp": 2, "zero": 0}, {"peer": "ddp"}, True),
        ({"dp": 2, "zero": 3}, {"peer": "fsdp2"}, False),
        pytest.param({"dp": 2, "zero": 2}, {"peer": "fsdp2", "reduce_every_microbatch": True}, True, marks=LONG),
        ({"tp": 2}, {"peer": "tensor_parallel"}, False),
        pytest.param({"pp": 2, "schedule": "gpipe"}, {"peer": "pipelining"}, False, marks=LONG),
        ({"pp": 2, "schedule": "1f1b"}, {"peer": "pipelining", "schedule": "1f1b"}, False),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_the_same_losses_as(pool, plan, peer, tied):
    losses, norms, their_losses, their_norms = pool.run(2, _both, plan, peer, tied, timeout_s=120)[0]
    allowed = TOLERANCE["fp32"]
    assert losses == pytest.approx(their_losses, rel=5 * allowed.loss)
    assert norms == pytest.approx(their_norms, rel=allowed.gradient_later)
    assert len(set(losses)) == STEPS, "training must change the loss"


def test_one_rank_is_plain_torch(pool):
    losses, norms, their_losses, their_norms = pool.run(1, _both, {}, {"peer": "one_process"}, True)[0]
    assert losses == pytest.approx(their_losses, rel=5 * TOLERANCE["fp32"].loss)
    assert norms == pytest.approx(their_norms, rel=TOLERANCE["fp32"].gradient_later)
    assert torch.tensor(losses).isfinite().all()
