"""The seam: a loss of single tokens, whatever finds their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from superstep.numerics.loss import IGNORE, linear_cross_entropy_sum
from superstep.numerics.objective import LossTarget, objective_sum

B, S, D, V = 3, 10, 32, 96
CHUNK = pytest.mark.parametrize("chunk_tokens", [1, 7, 512])


@dataclass(frozen=True)
class Bent:
    """A loss with a slope that is neither constant nor of one sign."""

    reads: tuple[str, ...] = ("weights",)
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()

    def terms(self, logp_T, streams):
        return streams["weights"] * logp_T.square() + logp_T, 2 * streams["weights"] * logp_T + 1

    def watch(self, logp_T, streams):
        return {}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def problem():
    h = torch.randn(B, S, D).requires_grad_()
    weight = torch.randn(V, D).div(D**0.5).requires_grad_()
    targets = torch.randint(V, (B, S))
    targets[0, :8] = IGNORE
    weights = torch.randn(B, S)
    weights[0, :8] = torch.nan  # of no target
    weights[1, 3] = 0.0
    return h, weight, targets, weights


def textbook(h, weight, targets, loss_of):
    h, weight = (x.detach().double().requires_grad_() for x in (h, weight))
    valid = targets != IGNORE
    logp = (h @ weight.T).log_softmax(-1)[valid].gather(-1, targets[valid][:, None])[:, 0]
    loss = loss_of(logp).sum()
    loss.backward()
    return loss.detach(), h.grad, weight.grad


def assert_near(ours, exact):
    assert (ours.double() - exact).norm() <= 2e-6 * exact.norm(), float((ours - exact).norm() / exact.norm())


@CHUNK
@pytest.mark.parametrize("into_buffer", [False, True])
def test_signed_weights_multiply_loss_and_gradients(chunk_tokens, into_buffer):
    h, weight, targets, weights = problem()
    buffer = torch.zeros(V, D) if into_buffer else None
    aim = LossTarget(targets, {"weights": weights})
    loss = linear_cross_entropy_sum(
        h, weight, targets, chunk_tokens=chunk_tokens, scale=0.1, weight_grad_into=buffer, terms=aim.token_terms
    )
    loss.backward()
    valid = targets != IGNORE
    exact, dh, dweight = textbook(h, weight, targets, lambda logp: -weights[valid] * logp)
    assert_near(loss.detach(), exact)
    assert_near(h.grad, 0.1 * dh)
    assert_near(weight.grad if buffer is None else buffer, 0.1 * dweight)
    assert h.grad[1, 3].count_nonzero() == 0
    with torch.no_grad():
        quiet = linear_cross_entropy_sum(h, weight, targets, chunk_tokens=chunk_tokens, terms=aim.token_terms)
    assert_near(quiet, exact)


@CHUNK
def test_any_loss_of_a_token_has_the_gradient_of_autograd(chunk_tokens):
    h, weight, targets, weights = problem()
    aim = LossTarget(targets, {"weights": weights}, Bent())
    linear_cross_entropy_sum(h, weight, targets, chunk_tokens=chunk_tokens, terms=aim.token_terms).backward()
    valid = targets != IGNORE
    loss, dh, dweight = textbook(h, weight, targets, lambda logp: weights[valid] * logp**2 + logp)
    assert_near(h.grad, dh)
    assert_near(weight.grad, dweight)
    logp = (h @ weight.T).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).flatten()
    h.grad = None
    whole = objective_sum(logp, aim)
    whole.backward()
    assert_near(whole.detach(), loss)
    assert_near(h.grad, dh)


@CHUNK
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_one_give_the_bits_of_the_plain_loss(chunk_tokens, dtype):
    h, weight, targets, _ = problem()
    found = []
    for aim in (LossTarget(targets), LossTarget(targets, {"weights": torch.ones(B, S)})):
        leaf, buffer = h.detach().to(dtype).requires_grad_(), torch.zeros(V, D)
        loss = linear_cross_entropy_sum(
            leaf,
            weight.to(dtype),
            targets,
            chunk_tokens=chunk_tokens,
            scale=1 / 22,
            weight_grad_into=buffer,
            terms=aim.token_terms,
        )
        loss.backward()
        found.append((loss.detach(), leaf.grad, buffer))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_tokens_are_told_of_in_their_order():
    h, weight, targets, weights = problem()
    told = []
    aim = LossTarget(targets, {"weights": weights}, tell=told.append)
    linear_cross_entropy_sum(h, weight, targets, chunk_tokens=7, terms=aim.token_terms)
    logp = torch.cat([seen.logp_T for seen in told]).view(B, S)
    exact = (h @ weight.T).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert torch.equal(logp[0, :8], torch.zeros(8))
    torch.testing.assert_close(logp[targets != IGNORE], exact[targets != IGNORE])
    assert torch.equal(
        torch.cat([seen.streams["weights"] for seen in told]).nan_to_num(), weights.flatten().nan_to_num()
    )
