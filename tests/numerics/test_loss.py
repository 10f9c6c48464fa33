"""The loss as a sum: the textbook's in float64, whatever is ignored and however it is chunked."""

from __future__ import annotations

import pytest
import torch

from superstep.kernels import cpu_library
from superstep.numerics.loss import IGNORE, VocabularyColumns, cross_entropy_sum, linear_cross_entropy_sum

B, S, D, V = 3, 10, 32, 96

# fp32: sums of 32 to 96 products stray by a few 6e-8. bf16: logits, their gradient and each product are
# rounded once, by at most 2^-9 = 2e-3 of themselves; the softmax between and the sums over chunks are fp32.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
DTYPE = pytest.mark.parametrize("dtype", ROUNDING, ids=["fp32", "bf16"])
CHUNK = pytest.mark.parametrize("chunk_tokens", [1, 7, 30, 512])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def problem(dtype, *, ignored=8):
    h_BSD = torch.randn(B, S, D).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D).div(D**0.5).to(dtype).requires_grad_()
    targets_BS = torch.randint(V, (B, S))
    targets_BS.view(-1)[:ignored] = IGNORE
    return h_BSD, weight_VD, targets_BS


def textbook(h_BSD, weight_VD, targets_BS):
    """Loss and gradients in float64, row by row that counts."""
    h, weight = (x.detach().double().requires_grad_() for x in (h_BSD, weight_VD))
    logp_BSV = (h @ weight.T).log_softmax(-1)
    rows = [(b, s) for b in range(B) for s in range(S) if targets_BS[b, s] != IGNORE]
    loss = -sum((logp_BSV[b, s, targets_BS[b, s]] for b, s in rows), torch.zeros((), dtype=torch.float64))
    if rows:
        loss.backward()
    return loss.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in (h, weight))


def assert_near(ours, exact, rtol):
    assert (ours.double() - exact).norm() <= rtol * exact.norm(), ((ours - exact).norm() / exact.norm()).item()


@DTYPE
def test_the_sum_is_fp32_and_exact_whatever_the_dtype_of_the_logits(dtype):
    logits_BSV = torch.randn(B, S, V).to(dtype)
    _, _, targets_BS = problem(dtype)
    loss = cross_entropy_sum(logits_BSV, targets_BS)
    valid = targets_BS != IGNORE
    exact = -logits_BSV.double().log_softmax(-1)[valid].gather(-1, targets_BS[valid][:, None]).sum()
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert_near(loss, exact, ROUNDING[torch.float32])


@DTYPE
@CHUNK
def test_loss_and_gradients_are_the_textbooks(dtype, chunk_tokens):
    h, weight, targets = problem(dtype)
    loss = linear_cross_entropy_sum(h, weight, targets, chunk_tokens=chunk_tokens)
    (loss / 22).backward()
    exact, dh, dweight = textbook(h, weight, targets)
    assert loss.dtype == torch.float32
    assert_near(loss, exact, ROUNDING[dtype])
    assert_near(h.grad, dh / 22, ROUNDING[dtype])
    assert_near(weight.grad, dweight / 22, ROUNDING[dtype])
    assert h.grad.view(-1, D)[:8].count_nonzero() == 0


@DTYPE
def test_without_a_gradient_the_loss_is_the_same(dtype):
    h, weight, targets = problem(dtype)
    with torch.no_grad():
        quiet = linear_cross_entropy_sum(h, weight, targets, chunk_tokens=7)
    assert not quiet.requires_grad
    assert_near(quiet, linear_cross_entropy_sum(h, weight, targets, chunk_tokens=7).double(), 1e-6)


def test_where_all_is_ignored_loss_and_gradients_are_nought():
    h, weight, targets = problem(torch.float32, ignored=B * S)
    for loss in (linear_cross_entropy_sum(h, weight, targets), cross_entropy_sum(h @ weight.T, targets)):
        loss.backward()
        assert loss == 0
        assert h.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_what_stands_in_an_ignored_row_does_not_matter():
    h, weight, targets = problem(torch.float32)
    with torch.no_grad():
        h.view(-1, D)[0] = torch.nan
    linear_cross_entropy_sum(h, weight, targets).backward()
    assert h.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@DTYPE
@CHUNK
def test_the_weights_gradient_may_be_added_to_a_buffer(dtype, chunk_tokens):
    h, weight, targets = problem(dtype)
    buffer = torch.full((V, D), 0.01)
    loss = linear_cross_entropy_sum(
        h, weight, targets, chunk_tokens=chunk_tokens, scale=1 / 22, weight_grad_into=buffer
    )
    loss.backward()
    exact, dh, dweight = textbook(h, weight, targets)
    assert weight.grad is None
    assert_near(loss, exact, ROUNDING[dtype])
    assert_near(h.grad, dh / 22, ROUNDING[dtype])
    assert_near(buffer - 0.01, dweight / 22, ROUNDING[dtype])


def test_validation_leaves_the_buffer_alone():
    h, weight, targets = problem(torch.float32)
    buffer = torch.zeros(V, D)
    with torch.no_grad():
        linear_cross_entropy_sum(h, weight, targets, weight_grad_into=buffer)
    assert buffer.count_nonzero() == 0


def test_a_bf16_weight_may_keep_its_gradient_in_fp32():
    h, weight, targets = problem(torch.bfloat16)
    linear_cross_entropy_sum(h, weight, targets, chunk_tokens=7).backward()
    rounded, weight.grad = weight.grad, None
    weight.grad_dtype = torch.float32
    linear_cross_entropy_sum(h, weight, targets, chunk_tokens=7).backward()
    assert (rounded.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(weight.grad.bfloat16(), rounded)
    assert not torch.equal(weight.grad, rounded.float())  # the sum over chunks kept its low bits


def test_a_frozen_weight_costs_no_gradient():
    h, weight, targets = problem(torch.float32)
    linear_cross_entropy_sum(h, weight.detach(), targets).backward()
    assert_near(h.grad, textbook(h, weight, targets)[1], ROUNDING[torch.float32])


@DTYPE
@pytest.mark.parametrize("widths", [(48, 48), (64, 64), (96, 96)], ids=["even", "padded", "a part of padding alone"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["torch", "kernel"])
def test_parts_of_the_vocabulary_have_their_share(dtype, widths, is_compiled):
    if is_compiled and cpu_library.compile_library().library is None:
        pytest.skip(cpu_library.compile_library().why)
    h, weight, targets = problem(dtype)
    exact, dh, dweight = textbook(h, weight, targets)
    scores = (h.detach() @ weight.detach().T).float().flatten(0, 1)
    lse, score = scores.logsumexp(1), scores.gather(1, targets.flatten().clamp(min=0)[:, None])[:, 0]
    whole = torch.stack((lse, score)).split(7, dim=1)
    found, seen, first = torch.zeros_like(dh), torch.zeros(2, B * S), 0
    for width in widths:
        mine = weight.detach()[first : first + width]
        part = torch.cat((mine, torch.ones(width - len(mine), D, dtype=dtype))).requires_grad_()
        chunk = iter(whole)
        here = []

        def over_ranks(lse, score, here=here, chunk=chunk):
            here.append(torch.stack((lse.exp(), score)))
            return tuple(next(chunk))

        given = h.detach().requires_grad_()
        loss = linear_cross_entropy_sum(
            given,
            part,
            targets,
            chunk_tokens=7,
            is_compiled=is_compiled,
            columns=VocabularyColumns(first, len(mine), over_ranks),
        )
        loss.backward()
        assert_near(loss, exact, ROUNDING[dtype])
        if len(mine):
            assert_near(part.grad[: len(mine)], dweight[first : first + len(mine)], ROUNDING[dtype])
        assert part.grad[len(mine) :].count_nonzero() == 0
        found += given.grad.double()
        seen += torch.cat(here, dim=1)
        first += width
    assert_near(found, dh, ROUNDING[dtype])
    counts = targets.flatten() != IGNORE
    assert_near(seen[0].log()[counts], lse.double()[counts], ROUNDING[dtype])
    assert_near(seen[1][counts], score.double()[counts], ROUNDING[dtype])


def test_no_more_than_a_chunk_of_logits_is_ever_made():
    widest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal widest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == V:
                widest = max(widest, out.shape[0])
            return out

    h, weight, targets = problem(torch.float32)
    with Watch():
        linear_cross_entropy_sum(h, weight, targets, chunk_tokens=7).backward()
    assert 0 < widest <= max(7, D)  # weightᵀ is [D, V]
