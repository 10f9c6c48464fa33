"""PyTorch's own parallelism agrees with one process, so the engine can be held against either."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.peers import IGNORE, PeerJob, PeerResult, initial_weights, random_batches, run, train_peer
from bench.peers_wrapped import missing
from bench.spawn import Workload, measure
from pool import Pool
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.model.sizes.named_sizes import SHAPES

pytestmark = pytest.mark.multiproc

ALLOWED = TOLERANCE["fp32"]

UNTIED = replace(SHAPES["tiny"], tied=False)
TIED = SHAPES["tiny"]
QK_NORM = replace(SHAPES["tiny"], qk_norm=True)


VARIANTS = [
    pytest.param(UNTIED, {"peer": "ddp"}, id="ddp"),
    pytest.param(TIED, {"peer": "ddp"}, id="ddp-tied"),
    pytest.param(UNTIED, {"peer": "fsdp2"}, id="fsdp2"),
    pytest.param(TIED, {"peer": "fsdp2"}, id="fsdp2-tied"),
    pytest.param(UNTIED, {"peer": "fsdp2", "reshard_after_forward": False}, id="fsdp2-weights-kept"),
    pytest.param(UNTIED, {"peer": "fsdp2", "reduce_every_microbatch": True}, id="fsdp2-reduced-each-time"),
    pytest.param(QK_NORM, {"peer": "tensor_parallel"}, id="tensor-parallel"),
    pytest.param(QK_NORM, {"peer": "tensor_parallel", "sequence_parallel": False}, id="tensor-parallel-whole"),
    pytest.param(UNTIED, {"peer": "pipelining"}, id="pipelining-gpipe"),
    pytest.param(UNTIED, {"peer": "pipelining", "schedule": "1f1b"}, id="pipelining-1f1b"),
]
WRAPPED = [
    pytest.param(peer, marks=pytest.mark.skipif(bool(missing(peer)), reason=missing(peer) or "it is there"))
    for peer in ("zero2", "zero3", "accelerate")
]


def job(shape, **settings) -> PeerJob:
    settings = {"peer": "one_process", "microbatch": 2, "keep_weights": True} | settings
    return PeerJob(
        shape=shape,
        weights=initial_weights(shape, seed=1),
        batches=random_batches(shape, 3, 8, 32, padded=True),
        lr=(1e-3, 5e-4, 1e-3),
        **settings,
    )


@pytest.fixture(scope="module")
def reference(pool: Pool):
    """One process, whole batch at once: each shape is trained when first asked for."""
    found: dict[object, PeerResult] = {}

    def trained(shape) -> PeerResult:
        if shape not in found:
            (found[shape],) = pool.run(1, run, job(shape, microbatch=8))
        return found[shape]

    return trained


@pytest.mark.long
@pytest.mark.parametrize(("shape", "settings"), VARIANTS)
def test_a_peer_trains_as_one_process_does(pool: Pool, reference, shape, settings):
    want = reference(shape)
    ranks = pool.run(2, run, job(shape, **settings))
    for got in ranks:
        assert got.losses == pytest.approx(want.losses, rel=ALLOWED.loss)
        assert got.grad_norms == pytest.approx(want.grad_norms, rel=ALLOWED.gradient)
    first = initial_weights(shape, seed=1)
    assert ranks[0].weights.keys() == want.weights.keys()
    for name, weight in ranks[0].weights.items():
        update = want.weights[name] - first[name]
        assert (weight - want.weights[name]).norm() <= ALLOWED.update * update.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("peer", WRAPPED)
def test_a_wrapped_peer_trains_as_ddp_does(peer):
    """In processes of their own: both change a process for good."""
    load = Workload(shape="tiny", sequence_tokens=32, steps=3, warmup=1)
    want, got = (measure(train_peer, 2, {"peer": name}, load) for name in ("ddp", peer))
    assert got["losses"] == pytest.approx(want["losses"], rel=ALLOWED.loss)
    assert got["grad_norms"] == pytest.approx(want["grad_norms"], rel=ALLOWED.gradient)


@pytest.mark.long
def test_bf16_stays_near_fp32(pool: Pool, reference):
    want = reference(UNTIED)
    for peer in ("ddp", "fsdp2"):
        got = pool.run(2, run, job(UNTIED, peer=peer, dtype="bf16"))[0]
        assert got.losses != want.losses
        assert got.losses == pytest.approx(want.losses, rel=TOLERANCE["bf16"].loss)
        assert all(weight.dtype == torch.float32 for weight in got.weights.values())


def test_a_microbatch_without_targets_counts_for_nothing(pool: Pool):
    tokens_BS, targets_BS = random_batches(UNTIED, 1, 8, 32)[0]
    targets_BS[4:] = IGNORE  # the second rank of two has nothing to learn from
    whole = replace(job(UNTIED), batches=[(tokens_BS, targets_BS)])
    half = replace(whole, batches=[(tokens_BS[:4], targets_BS[:4])])
    (want,) = pool.run(1, run, half)
    got = pool.run(2, run, replace(whole, peer="ddp"))[0]
    assert got.losses == pytest.approx(want.losses, rel=ALLOWED.loss)
    assert got.grad_norms == pytest.approx(want.grad_norms, rel=ALLOWED.gradient)


def test_memory_is_measured_from_a_baseline(pool: Pool):
    wide = replace(UNTIED, vocab=16384)
    (result,) = pool.run(1, run, job(wide))
    state_bytes = 4 * 4 * 2 * wide.vocab * wide.width  # weights, gradients, two moments; embedding and head alone
    assert state_bytes < result.peak_rss_bytes - result.baseline_bytes < 20 * state_bytes
