"""Sinks of attention against a softmax with one score more, and what a compiler sees of them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from superstep.numerics.attention import attention_sinks
from superstep.numerics.attention.attention_sinks import join_sinks, sinks_gradient

B, S, N, H = 2, 5, 3, 4


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def test_sinks_take_a_share_of_the_softmax_and_have_its_gradient():
    scores, values, sinks, grad = (
        drawn(B, N, S, 7),
        drawn(B, N, 7, H),
        drawn(B, S, N).requires_grad_(),
        drawn(B, S, N, H),
    )
    whole = torch.cat((scores, sinks.transpose(1, 2).unsqueeze(-1)), -1)
    expected = (whole.softmax(-1)[..., :-1] @ values).transpose(1, 2)
    (dsinks,) = torch.autograd.grad(expected, sinks, grad)

    out = (scores.softmax(-1) @ values).transpose(1, 2).float()
    found, lse = join_sinks(out, scores.logsumexp(-1).float(), sinks.detach())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), whole.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sinks_gradient(grad.float(), found, lse, sinks.detach()), dsinks, rtol=1e-4, atol=1e-5)


def test_a_compiler_sees_one_operator_and_no_kernel_of_ours(monkeypatch):
    monkeypatch.setattr(attention_sinks, "row_sum", lambda values: pytest.fail("a kernel was traced"))
    with FakeTensorMode():
        out, lse, sinks = torch.empty(B, S, N, H), torch.empty(B, N, S), torch.empty(B, S, N)
        assert sinks_gradient(out, out, lse, sinks).shape == (B, S, N)
