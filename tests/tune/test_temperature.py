"""Answers that are sampled at a temperature other than 1: the policy is the softmax of the divided logits.

What is trained is held against the policy gradient as one writes it for one process: a decoder on whole answers, their
tokens' log-probabilities by autograd, advantages within each group.
"""

from __future__ import annotations

import math

import pytest
import torch

import reinforced
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import open_weights
from superstep.model.unit import parameters
from superstep.tune.rl.rollout_log import NAME, RolloutLog

pytestmark = pytest.mark.multiproc

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return reinforced.start(tmp_path_factory.mktemp("start"))


def run(pool, root, start, ranks=1, rollout=None, **how):
    rollout = {"temperature": TEMPERATURE} | (rollout or {})
    job = reinforced.job(root, start, steps=1, lag=0, rollout=rollout, **how)
    return job, pool.run(ranks, reinforced.run, job)[0][0]


def plain_decoder(job, start):
    model, weights = Decoder(job.run.shape), open_weights(start)
    with torch.no_grad():
        for spec, param in parameters(model, units(job.run.shape)).values():
            for name, view in spec.views(param):
                view.copy_(weights[name][:])
    return model


def textbook_norm(job, start, root, temperature):
    """The norm of the policy gradient (Williams 1992) of what is on record; and how far its log-probabilities lie from
    those that the sampler told, at most.
    """
    model = plain_decoder(job, start)
    record, farthest = RolloutLog(root / NAME, is_kept=False), 0.0
    count = sum(len(group.answers) for group in record.groups.values())
    for number, group in record.groups.items():
        rewards = torch.tensor([verdict.reward for verdict in record.verdicts[number]], dtype=torch.float64)
        gains = (rewards - rewards.mean()) / rewards.std() if rewards.std() > 0 else torch.zeros_like(rewards)
        for answer, gain in zip(group.answers, gains.tolist(), strict=True):
            for strand in answer.strands:
                ids = torch.tensor(strand.tokens)
                logits = model(ids[None])[0] / temperature
                places = torch.tensor(strand.drawn)
                logp = logits.log_softmax(-1)[places - 1, ids[places]]
                farthest = max(farthest, float((logp.detach() - torch.tensor(strand.logprobs)).abs().max()))
                (-gain * logp.sum() / answer.drawn_tokens / count).backward()
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters())), farthest


LAYOUTS = {
    "exact": (1, {}),
    "exact, tp": (2, {"tp": 2, "rollout": {"tp": 2}}),
    "fast": (1, {"exact": False}),
    "fast, dp": (2, {"exact": False, "dp": 2}),
    "fast, tp": (2, {"exact": False, "tp": 2, "rollout": {"tp": 2}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_the_policy_gradient_at_the_temperature_of_the_rollout(pool, start, tmp_path, layout):
    ranks, how = LAYOUTS[layout]
    job, told = run(pool, tmp_path / "run", start, ranks, **how)
    norm, farthest = textbook_norm(job, start, tmp_path / "run", TEMPERATURE)
    other, _ = textbook_norm(job, start, tmp_path / "run", 1.0)
    assert told["norm"] == pytest.approx(norm, rel=1e-4)
    assert abs(other - norm) > 0.1 * norm, "and another temperature has another gradient"
    assert farthest < 1e-4
    assert told["measures"]["ratio"] == 1.0
    assert told["max_dlogp"] == 0.0
    if "exact" not in layout:
        assert told["measures"]["max_sampler_dlogp"] < 1e-4


def test_the_reference_has_the_same_temperature(pool, start, tmp_path):
    _, told = run(pool, tmp_path / "run", start, rl={"kl_coef": 0.1})
    assert told["measures"]["reference_kl"] == 0.0
