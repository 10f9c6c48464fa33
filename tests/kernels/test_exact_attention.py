"""Exact mode's attention: right, and with bits that nothing but a query and the keys it sees decides."""

from __future__ import annotations

import pytest
import torch

from superstep.engine.exact.attention import ExactAttend, WholeSequence
from superstep.kernels import exact_attention
from superstep.kernels.attention import reference
from superstep.kernels.exact_attention import Summed
from superstep.numerics.fixed_point import ACTIVATION, Grid, OutOfRange

BATCH, HEADS, KEY_HEADS, TOKENS, WIDTH = 2, 4, 2, 160, 32
PARTS = [32, 64, 96, 128, 160]
SCALE, LIMIT = 2.0**ACTIVATION.bits, 2.0


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As exact mode has it."""
    if not exact_attention.takes(torch.empty(1, WIDTH)):
        pytest.skip("there is no compiler here")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def inputs():
    """q, k, v and the gradient of the output, [B, heads, tokens, H]."""
    torch.manual_seed(5)
    heads = HEADS, KEY_HEADS, KEY_HEADS, HEADS
    return [torch.randn(BATCH, TOKENS, count, WIDTH).transpose(1, 2) for count in heads]


def backward(grad, inputs, out, lse, *, first=0, ends=PARTS):
    """The gradients of q, and of k and v on the grid, and what was outside of it."""
    dk, dv = (torch.zeros(x.shape, dtype=torch.int64) for x in inputs[1:])
    summed = Summed(dk=dk, dv=dv, ends=ends, scale=SCALE, limit=LIMIT)
    dq, outside = exact_attention.add_backward(grad, tuple(inputs), out, lse, first=first, summed=summed)
    return dq, dk, dv, outside


def test_it_is_attention(inputs):
    *qkv, grad = inputs
    wide = [x.double().requires_grad_() for x in qkv]
    rights, lse = reference(*wide, is_causal=True)
    out, found = exact_attention.attend(*qkv)
    dq, dk, dv, outside = backward(0.01 * grad, qkv, out, found)
    assert outside == 0.0
    assert (found - lse).abs().max() < 1e-5
    gradients = torch.autograd.grad(rights, wide, 0.01 * grad.double())
    for mine, right in zip((out, dq, dk / SCALE, dv / SCALE), (rights, *gradients), strict=True):
        assert (mine - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize(("begin", "end"), [(0, 32), (32, 96), (96, 160), (128, 160)])
def test_some_queries_have_the_bits_of_all(inputs, begin, end):
    *qkv, grad = inputs
    out, lse = exact_attention.attend(*qkv)
    dq = backward(0.01 * grad, qkv, out, lse)[0]
    mine = slice(begin, end)
    some = [qkv[0][:, :, mine], *(x[:, :, :end] for x in qkv[1:])]
    found, its = exact_attention.attend(*some, first=begin)
    assert torch.equal(found, out[:, :, mine])
    assert torch.equal(its, lse[:, :, mine])
    ends = [at - begin for at in PARTS if begin < at <= end]
    assert torch.equal(backward(0.01 * grad[:, :, mine], some, found, its, first=begin, ends=ends)[0], dq[:, :, mine])
    alone, _ = exact_attention.attend(qkv[0][:, :, end - 1 : end], *some[1:], first=end - 1)
    assert torch.equal(alone, out[:, :, end - 1 : end])


def test_parts_add_up_to_the_same_bits_in_any_order(inputs):
    *qkv, grad = inputs
    out, lse = exact_attention.attend(*qkv)
    _, dk, dv, _ = backward(0.01 * grad, qkv, out, lse)
    sums = [torch.zeros_like(dk), torch.zeros_like(dv)]
    for begin, end in reversed(list(zip((0, *PARTS), PARTS, strict=False))):
        mine = slice(begin, end)
        given = [qkv[0][:, :, mine], *(x[:, :, :end] for x in qkv[1:])]
        part = backward(
            0.01 * grad[:, :, mine], given, out[:, :, mine], lse[:, :, mine], first=begin, ends=[end - begin]
        )
        for total, share in zip(sums, part[1:3], strict=True):
            total[:, :, :end] += share
    assert torch.equal(sums[0], dk)
    assert torch.equal(sums[1], dv)


def test_rows_say_what_they_see(inputs):
    q, k, v, _ = inputs
    starts = torch.tensor([[0] * 40 + [40] * 120, [0] * 7 + [7] * 153])
    ends = torch.arange(1, TOKENS + 1).expand(BATCH, -1)
    out, _ = exact_attention.attend(q, k, v, starts_BS=starts, ends_BS=ends)
    right, _ = reference(q.double(), k.double(), v.double(), is_causal=True, starts_BS=starts)
    assert (out - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize("bad", [1e4, float("nan")])
def test_a_sum_without_room_is_told_with_its_size(inputs, bad):
    *qkv, grad = inputs
    grad = 0.01 * grad
    grad[0, 0, 3, 5] = bad
    out, lse = exact_attention.attend(*qkv)
    outside = backward(grad, qkv, out, lse)[3]
    assert outside > LIMIT or outside != outside
    attend = ExactAttend(range(5), WholeSequence(), Grid(ACTIVATION.bits, 16))
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in qkv]
    with pytest.raises(OutOfRange, match=r"a gradient has a term of \S+, and its exact sum has room for 16 terms"):
        attend(*leaves).backward(grad.transpose(1, 2))


@pytest.mark.parametrize("documents", [None, [[0] * 37 + [37] * 90 + [127] * 33, [0] * 5 + [5] * 155]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_computes_the_same_where_there_is_no_kernel(inputs, dtype, documents, monkeypatch):
    starts = None if documents is None else torch.tensor(documents)
    attend = ExactAttend(range(5), WholeSequence(), starts=starts)
    *qkv, grad = (x.transpose(1, 2).to(dtype) for x in inputs)

    def found():
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, 0.01 * grad)

    mine = found()
    monkeypatch.setattr(exact_attention, "takes", lambda x: False)
    for a, b in zip(mine, found(), strict=True):
        assert (a.float() - b.float()).norm() < (1e-6 if dtype == torch.float32 else 4e-3) * b.float().norm()
