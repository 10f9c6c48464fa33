"""Losses of reinforcement learning and of preferences, each against a few lines of autograd on whole logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from superstep.errors import ConfigError, DataError
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import LossTarget, objective_sum
from superstep.numerics.policy import PolicyLoss
from superstep.numerics.sequence_losses import dpo, sequence_policy

T, V = 400, 11


def problem(seed=0):
    """Logits, targets and streams that lie on both sides of every bound: fp64, so that only a wrong formula shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(T, generator=generator, dtype=torch.float64)

    logits = torch.randn(T, V, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(V, (T,), generator=generator)
    logp = logits.detach().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    streams = {
        "advantages": normal(),
        "old": logp + 0.5 * normal(),
        "reference": logp + 0.5 * normal(),
        "weights": normal() * (torch.rand(T, generator=generator) < 0.8),
    }
    streams["sampled"] = streams["old"] + 0.5 * normal()
    return logits, targets, streams


def of_targets(logits, targets):
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def surrogate(policy, logp, s):
    gain, ratio = s["advantages"], (logp - s["old"]).exp()
    if policy.surrogate == "score":
        return -gain * logp
    if policy.surrogate == "ratio":
        return -gain * ratio
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high) * gain)
    if policy.dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, -policy.dual_clip * gain), loss)
    return loss


def correction(policy, s):
    m = (s["old"] - s["sampled"]).exp()
    return {
        "none": torch.ones_like(m),
        "tis": torch.minimum(m, torch.tensor(policy.cap, dtype=m.dtype)),
        "mis": m * ((m >= policy.floor) & (m <= policy.cap)),
    }[policy.correction]


def distance(policy, logp, s):
    d = s["reference"] - logp
    k2 = d**2 / 2
    return {"k1": -d.detach() + k2 - k2.detach(), "k2": k2, "k3": d.exp() - d - 1}[policy.kl]


def textbook(policy, logp, s):
    loss = correction(policy, s) * surrogate(policy, logp, s)
    if policy.kl_coef:
        loss = loss + policy.kl_coef * distance(policy, logp, s)
    return s.get("weights", 1.0) * loss


POLICIES = [
    PolicyLoss(surrogate="score"),
    PolicyLoss(surrogate="ratio"),
    PolicyLoss(),
    PolicyLoss(clip_low=0.2, clip_high=0.28),
    PolicyLoss(clip_low=0.0, clip_high=0.0),
    PolicyLoss(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
    PolicyLoss(surrogate="ratio", correction="tis", cap=1.2),
    PolicyLoss(correction="tis", cap=1.2),
    PolicyLoss(correction="mis", cap=1.5, floor=0.5),
    PolicyLoss(kl="k1", kl_coef=0.3),
    PolicyLoss(kl="k2", kl_coef=0.3),
    PolicyLoss(kl="k3", kl_coef=0.3),
    PolicyLoss(surrogate="score", correction="mis", cap=1.5, kl="k3", kl_coef=0.1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("weighs", [True, False])
def test_loss_and_gradient_are_those_of_autograd_on_whole_logits(policy, weighs):
    logits, targets, streams = problem()
    if not weighs:
        del streams["weights"]
    theirs = textbook(policy, of_targets(logits, targets), streams).sum()
    (exact,) = torch.autograd.grad(theirs, logits)
    ours = objective_sum(of_targets(logits, targets), LossTarget(targets, streams, policy))
    (gradient,) = torch.autograd.grad(ours, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_derivative_is_that_of_the_loss(policy):
    """By differences, which know nothing of how a derivative is written; bounds and k1 are left out where they jump."""
    logits, targets, streams = problem()
    logp, step = of_targets(logits.detach(), targets), 1e-6
    _, slope = policy.terms(logp, streams)
    up, down = (policy.terms(logp + sign * step, streams)[0] for sign in (1, -1))
    numeric = (up - down) / (2 * step)
    if policy.kl_coef and policy.kl == "k1":
        assert (numeric - slope).abs().max() > 0.01  # its value is k1, its derivative that of k2
    else:
        near = (numeric - slope).abs() < 1e-6
        assert near.double().mean() > 0.99


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_is_told_is_what_happened(policy):
    logits, targets, streams = problem()
    logp = of_targets(logits.detach(), targets)
    told = policy.watch(logp, streams)
    assert set(told) == {*policy.sums, *policy.maxima}
    ratio = (logp - streams["old"]).exp()
    assert torch.equal(told["ratio"], ratio)
    assert torch.equal(told["max_dlogp"], (logp - streams["old"]).abs())
    assert bool((told["old_k3"] >= 0).all())
    if policy.surrogate == "clip":
        # Left alone are the tokens whose surrogate has no derivative, each by one bound.
        leaves = sum(told[name].double() for name in ("clip_low", "clip_high", "clip_dual") if name in told)
        slope = PolicyLoss(clip_low=policy.clip_low, clip_high=policy.clip_high, dual_clip=policy.dual_clip).terms(
            logp, {**streams, "weights": torch.ones_like(logp)}
        )[1]
        assert torch.equal(leaves, (slope == 0).double())
        assert 0 < told["clip_low"].double().mean() < 1
        assert 0 < told["clip_high"].double().mean() < 1
    if policy.correction == "mis":
        assert torch.equal(told["masked"], correction(policy, streams) == 0)
        assert told["masked"].any()


def test_on_the_weights_of_then_the_ratio_is_one_and_nothing_is_clipped():
    logits, targets, streams = problem()
    logp = of_targets(logits.detach(), targets).float()
    streams = {name: stream.float() for name, stream in streams.items()} | {"old": logp}
    told = PolicyLoss(clip_low=0.0, clip_high=0.0).watch(logp, streams)
    assert torch.equal(told["ratio"], torch.ones(T))
    assert not any(told[name].any() for name in ("old_k1", "old_k3", "max_dlogp", "clip_low", "clip_high"))


def answers():
    """Six answers of different lengths among tokens that count for none."""
    answer = torch.full((T,), -1)
    first = 3
    for number, length in enumerate((1, 40, 17, 90, 5, 60)):
        answer[first : first + length] = number
        first += length + 7
    return answer


SEQUENCE = [
    PolicyLoss(clip_low=0.03, clip_high=0.04),
    PolicyLoss(surrogate="ratio"),
    PolicyLoss(clip_low=0.03, clip_high=0.04, correction="tis", cap=1.01),
    PolicyLoss(clip_low=0.03, clip_high=0.04, correction="mis", cap=1.1, floor=0.9),
    PolicyLoss(clip_low=0.03, clip_high=0.04, kl="k3", kl_coef=0.2),
]


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("policy", SEQUENCE, ids=str)
def test_two_passes_give_the_gradient_of_a_loss_of_whole_answers(policy, weighs):
    logits, targets, streams = problem()
    answer, gains = answers(), torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64) if weighs else torch.ones(6)
    # Nobody looks at what stands beside the answers.
    streams = {name: stream.where(answer >= 0, torch.nan) for name, stream in streams.items()}

    def whole(logp):
        total = 0.0
        for number in range(6):
            mine = answer == number
            s = {name: stream[mine].mean() for name, stream in streams.items()} | {"advantages": gains[number]}
            loss = correction(policy, s) * surrogate(policy, logp[mine].mean(), s)
            if policy.kl_coef:
                of_tokens = {"reference": streams["reference"][mine]}
                loss = loss + policy.kl_coef * distance(policy, logp[mine], of_tokens).mean()
            total = total + weights[number] * loss
        return total

    theirs = whole(of_targets(logits, targets))
    (exact,) = torch.autograd.grad(theirs, logits)
    found = sequence_policy(policy, of_targets(logits.detach(), targets), streams, answer, gains, weights)
    assert found.loss == pytest.approx(theirs.item(), rel=1e-12)
    assert found.weights.dtype == torch.float32
    second = objective_sum(of_targets(logits, targets), LossTarget(targets, {"weights": found.weights.double()}))
    (gradient,) = torch.autograd.grad(second, logits)
    torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=1e-9)
    assert found.weights[answer < 0].count_nonzero() == 0
    if policy.surrogate == "clip" and policy.correction == "none":
        assert found.measures["clip_low"] + found.measures["clip_high"] > 0
        s = {name: torch.stack([stream[answer == n].mean() for n in range(6)]) for name, stream in streams.items()}
        mean = torch.stack([of_targets(logits.detach(), targets)[answer == n].mean() for n in range(6)])
        ratio = (mean - s["old"]).exp()[weights != 0]
        assert found.measures["ratio"] == pytest.approx(ratio.mean().item(), rel=1e-12)
        assert found.measures["max_dlogp"] == pytest.approx(ratio.log().abs().max().item(), rel=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_is_its_closed_form(smoothing):
    logits, targets, streams = problem()
    answer, beta = answers(), 0.3
    reference = streams["reference"]
    margins, gains = [], []
    for chosen, rejected in ((0, 1), (2, 3), (4, 5)):
        ours = of_targets(logits, targets)
        gain = [(ours[answer == n] - reference[answer == n]).sum() for n in (chosen, rejected)]
        margins.append(beta * (gain[0] - gain[1]))
        gains.append(gain)
    margin = torch.stack(margins)
    theirs = (-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)).sum()
    (exact,) = torch.autograd.grad(theirs, logits)
    found = dpo(of_targets(logits.detach(), targets), reference, answer, 3, beta=beta, label_smoothing=smoothing)
    assert found.loss == pytest.approx(theirs.item(), rel=1e-12)
    second = objective_sum(of_targets(logits, targets), LossTarget(targets, {"weights": found.weights.double()}))
    (gradient,) = torch.autograd.grad(second, logits)
    torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=1e-9)
    # Rafailov 2023, eq. 7 below: each token of a pair is moved by beta · sigmoid(-margin), chosen up and rejected down.
    if smoothing == 0:
        for pair, h in enumerate(margin.tolist()):
            moved = torch.tensor(beta / (1 + math.exp(h)), dtype=torch.float32)
            assert torch.allclose(found.weights[answer == 2 * pair], moved)
            assert torch.allclose(found.weights[answer == 2 * pair + 1], -moved)
    assert found.measures["accuracy"] == float((margin > 0).double().mean())
    assert found.measures["chosen_reward"] == pytest.approx(beta * sum(g[0].item() for g in gains) / 3)


def bandit(policy, steps=600):
    """What a policy over three arms earns on average after it learnt from another one's draws.

    The sampler nearly always pulls a fair arm and rarely the best one; the trainer takes the draws for its own.
    """
    rewards, sampler = torch.tensor([1.0, 0.7, 0.0]), torch.tensor([0.05, 0.6, 0.35]).log()
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(3)
    for _ in range(steps):
        arms = torch.multinomial(sampler.exp(), 64, replacement=True, generator=generator)
        logp = logits.log_softmax(-1)
        gains = rewards[arms] - rewards[arms].mean()
        streams = {"advantages": gains, "old": logp[arms], "sampled": sampler[arms]}
        _, slope = policy.terms(logp[arms], streams)
        onehot = F.one_hot(arms, 3).float()
        logits = logits - 0.3 * (slope[:, None] * (onehot - logp.exp())).mean(0)
    return float((logits.softmax(-1) * rewards).sum())


def test_an_off_policy_bandit_converges_with_a_correction_and_not_without():
    assert bandit(PolicyLoss()) < 0.75
    assert bandit(PolicyLoss(correction="tis", cap=8.0)) > 0.95
    # Beyond its cap, of 1 / 0.05, it would leave out the best arm itself.
    assert bandit(PolicyLoss(correction="mis", cap=30.0)) > 0.95


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip_low": -0.1}, "clip_low = -0.1 must be in 0 to 1"),
        ({"clip_low": 1.5}, "clip_low = 1.5"),
        ({"clip_high": -1.0}, "clip_high = -1.0 must be at least 0"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0 must be above 1"),
        ({"cap": 0.0}, "cap = 0.0 must be above 0"),
        ({"floor": 3.0}, "floor = 3.0 must be at least 0 and below cap"),
        ({"kl_coef": -1.0}, "kl_coef = -1.0 must be at least 0"),
    ],
)
def test_a_number_that_means_nothing_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        PolicyLoss(**wrong)


def test_an_answer_without_a_token_and_dpos_numbers_are_refused():
    logp, answer = torch.zeros(4), torch.tensor([0, 0, 2, -1])
    with pytest.raises(DataError, match="answer 1 of 4"):
        dpo(logp, logp, answer, 2, beta=0.1)
    with pytest.raises(DataError, match="answer 2 of 2"):
        dpo(logp, logp, torch.tensor([0, 1, 2, -1]), 1, beta=0.1)
    with pytest.raises(ConfigError, match="beta = 0"):
        dpo(logp, logp, torch.tensor([0, 1, 1, -1]), 1, beta=0)
    with pytest.raises(ConfigError, match=r"label_smoothing = 0\.5"):
        dpo(logp, logp, torch.tensor([0, 1, 1, -1]), 1, beta=0.1, label_smoothing=0.5)


def test_streams_of_tokens_without_a_target_are_not_looked_at():
    logits, targets, streams = problem()
    targets = targets.masked_fill(torch.arange(T) % 3 == 0, IGNORE)
    streams = {name: stream.where(targets != IGNORE, torch.nan) for name, stream in streams.items()}
    policy = PolicyLoss(correction="tis", kl_coef=0.1)
    told = []
    loss, slope = LossTarget(targets, streams, policy, told.append).terms(
        of_targets(logits.detach(), targets.clamp(min=0))
    )
    assert loss.isfinite().all()
    assert slope.isfinite().all()
    assert slope[targets == IGNORE].count_nonzero() == 0
    assert int(told[0].counts_T.sum()) == int((targets != IGNORE).sum())
