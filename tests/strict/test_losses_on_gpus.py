"""Losses of post-training and a loss of a user's own on emulated GPUs: loss and gradients of autograd on the CPU."""

from dataclasses import replace
from functools import cache

import pytest

import objectives
import small
from objectives import compare
from strict_ranks import gpu_of, prove_on_gpus
from superstep.numerics.loss import IGNORE
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict

TEMPERATURE = 0.7
LAYOUTS = {
    "one": ({"microbatch": 4, "recompute": "full"}, TEMPERATURE),
    "experts": ({"experts": "dropless"}, 1.0),
    "dp": ({"dp": 2, "zero": 3}, 1.0),
    "tp": ({"tp": 2, "sequence_parallel": True}, TEMPERATURE),
    "whole vocabulary": ({"tp": 2, "rules": (("vocab", "none"),)}, TEMPERATURE),
    "ring": ({"cp": 2}, 1.0),
    "pp": ({"pp": 2, "schedule": "zb-h1"}, TEMPERATURE),
    "exact": ({"tp": 2, "exact": True}, 1.0),
}
"""Each way in which logits become log-probabilities with a temperature, and as many layouts without one."""


def on_gpu(rank, world, run, found, temperature):
    with gpu_of(rank, world) as (device, report):
        return objectives.results_on(device, rank, run, found, temperature), report()


@cache
def textbooks(experts, temperature):
    return objectives.textbooks(resolve(objectives.config(experts=experts)), objectives.batch(), temperature)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_post_training_are_those_of_autograd(pool, name):
    layout, temperature = LAYOUTS[name]
    run, found = resolve(objectives.config(**layout)), objectives.batch()
    ranks = pool.run(run.plan.mesh.world, on_gpu, run, found, temperature, timeout_s=60)
    for rank, (_, observed) in enumerate(ranks):
        assert observed.races == {}
        assert observed.contexts == {rank}
    trials = [objectives.whole(parts) for parts in zip(*(results for results, _ in ranks), strict=True)]
    total = float(found.streams["weights"][found.targets_BS != IGNORE].abs().sum())
    expected = textbooks(layout.get("experts"), temperature)
    for trial, ours, theirs in zip(objectives.TRIALS, trials, expected, strict=True):
        compare(ours, theirs, trial.__name__)
        if trial is objectives.two_passes:  # the loss of its second pass says nothing
            continue
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        loss, weight = ours.evaluated
        assert weight == pytest.approx(total, rel=1e-6)
        assert loss / found.divisor == pytest.approx(theirs.loss, rel=1e-5)


OWN_LOSS = {
    "one": {"microbatch": 2},
    "bf16": {"microbatch": 2, "compute": "bf16"},
    "dp": {"dp": 2, "zero": 2, "microbatch": 2},
    "tp": {"tp": 2, "microbatch": 2},
    "pp": {"pp": 2, "microbatch": 2},
}
FOCAL = """
def loss(logp):
    return -((1 - logp.exp()) ** 2) * logp
"""


@pytest.mark.parametrize("name", OWN_LOSS)
def test_a_loss_of_a_users_own_is_that_of_the_reference(pool, tmp_path, name):
    path = tmp_path / "my_loss.py"
    path.write_text(FOCAL)
    config = small.config(layers=2, packed=False, **OWN_LOSS[name])
    run = resolve(replace(config, train=replace(config.train, loss=str(path))))
    batches = small.batches(packed=False)
    write_reference(run.shape, run.config.train, batches, tmp_path)
    for first, observed in pool.run(run.plan.mesh.world, prove_on_gpus, run, batches, tmp_path, timeout_s=60):
        assert first is None
        assert observed.races == {}
