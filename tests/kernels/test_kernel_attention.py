"""The attention kernel and its gradients against all scores at once in fp64, whatever the processor has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from superstep.kernels import attention, compile_cpp
from superstep.kernels.attention import FLAGS, SOURCES, attend, attend_backward, reference, takes

NAMES = ("out", "lse", "dq", "dk", "dv")
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
"""Relative errors: a few units in the last place of what is stored."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of one attention; of documents, the most tokens."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 64
    keys: int = 64
    width: int = 32
    is_causal: bool = True
    documents: int = 0

    def inputs(self, dtype):
        """q, k, v and the gradient of the output, [B, heads, tokens, H], laid out as a model has them."""
        torch.manual_seed(3)
        shapes = [
            (tokens, heads)
            for tokens, heads in (
                (self.queries, self.heads),
                (self.keys, self.kv_heads),
                (self.keys, self.kv_heads),
                (self.queries, self.heads),
            )
        ]
        return [torch.randn(self.batch, *shape, self.width).to(dtype).transpose(1, 2) for shape in shapes]

    @property
    def starts(self):
        """Where each query's document starts: of another length in each row."""
        if not self.documents:
            return None
        rows = [[at - at % max(1, self.documents - row) for at in range(self.queries)] for row in range(self.batch)]
        return torch.tensor(rows)


CASES = [
    Case(),
    Case(documents=26, queries=130, keys=130),
    Case(documents=1),
    Case(batch=1, heads=2, kv_heads=1, queries=37, keys=37, width=16, documents=5),
    Case(heads=8, queries=200, keys=200, width=64),  # blocks that are whole, and the last ones of both
    Case(batch=1, kv_heads=4, queries=129, keys=129, width=80),  # a width of one panel and a part
    Case(queries=50, keys=77, width=64, is_causal=False),  # another rank's keys
    Case(batch=1, heads=8, queries=300, keys=300, width=128, documents=90),
    Case(queries=1, keys=1, width=16),
    Case(queries=100, keys=50, width=48),  # the last queries see all keys
]


def expected(case):
    """By ``reference`` in fp64, of the numbers as each dtype has them."""

    def of(dtype):
        *qkv, grad = (x.double() for x in case.inputs(dtype))
        qkv = [x.requires_grad_() for x in qkv]
        out, lse = reference(*qkv, is_causal=case.is_causal, starts_BS=case.starts)
        return [x.detach() for x in (out, lse, *torch.autograd.grad(out, qkv, grad))]

    return of


def found(case, dtype, inputs=None):
    *qkv, grad = inputs or case.inputs(dtype)
    assert takes(*qkv, grad)
    out, lse = attend(*qkv, is_causal=case.is_causal, starts_BS=case.starts)
    how = {"is_causal": case.is_causal, "starts_BS": case.starts}
    return [out, lse, *attend_backward(grad, tuple(qkv), out, lse, **how)]


def errors(ours, wanted):
    """Of each of NAMES, relative to all of it, or to numbers of 0.2 where it is nothing."""
    scale = [max(float(x.norm()), 0.2 * x.numel() ** 0.5) for x in wanted]
    return [float((a.double() - b).norm()) / s for a, b, s in zip(ours, wanted, scale, strict=True)]


@pytest.fixture(params=["native", "x86-64-v3"])
def processor(request, monkeypatch, tmp_path_factory):
    """The kernel as it is compiled for this processor, and as one without AVX-512 has it."""
    if request.param != "native":
        others = {"-march=native": f"-march={request.param}", "-O3": "-O1"}  # which compiles in a fifth of the time
        flags = tuple(others.get(flag, flag) for flag in FLAGS)
        built = compile_cpp.build(SOURCES, flags, tmp_path_factory.getbasetemp() / "kernels")
        monkeypatch.setattr(attention, "compile_library", lambda: built)
    if attention.compile_library().library is None:
        pytest.skip(attention.compile_library().why)


@pytest.mark.parametrize(
    ("dtype", "in_pairs"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_it_computes_what_all_scores_at_once_give(processor, monkeypatch, dtype, in_pairs):
    monkeypatch.setattr(attention, "multiplies_pairs", lambda: in_pairs)
    for case in CASES:
        for name, error in zip(NAMES, errors(found(case, dtype), expected(case)(dtype)), strict=True):
            assert error <= ALLOWED[dtype], (case, name, error)


@pytest.mark.parametrize(
    ("dtype", "in_pairs"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_scores_that_grow_from_key_to_key_are_counted_from_the_largest(processor, monkeypatch, dtype, in_pairs):
    """Each block of keys has scores many times those before it; and the first ones would be infinite by themselves."""
    monkeypatch.setattr(attention, "multiplies_pairs", lambda: in_pairs)
    case = Case(batch=1, heads=1, kv_heads=1, queries=200, keys=200, width=64, is_causal=False)
    q, k, v, grad = case.inputs(torch.float32)
    q = torch.ones_like(q)
    k = (torch.linspace(20.0, 60.0, case.keys)[:, None] + 0.01 * k).contiguous()
    inputs = [x.to(dtype) for x in (q, k, v, grad)]
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out, lse = reference(*leaves, is_causal=False)
    wanted = [x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, inputs[3].double()))]
    mine = found(case, dtype, inputs)
    assert all(x.isfinite().all() for x in mine)
    # dq and dk are sums of what cancels here; of scores of 500 the last digit is 3e-5.
    for name, error in zip(NAMES, errors(mine, wanted), strict=True):
        assert error <= max(1e-4, ALLOWED[dtype]) or name in ("dq", "dk"), (name, error)


@pytest.mark.parametrize(
    ("dtype", "in_pairs"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_query_that_sees_none_of_these_keys_gets_nothing(processor, monkeypatch, dtype, in_pairs):
    """Its document begins behind them: they are another rank's."""
    monkeypatch.setattr(attention, "multiplies_pairs", lambda: in_pairs)
    case = Case(batch=1, queries=70, keys=130, is_causal=False)
    q, k, v, grad = case.inputs(dtype)
    starts = torch.where(torch.arange(70) < 50, 3, 130)[None]
    out, lse = attend(q, k, v, is_causal=False, starts_BS=starts)
    assert not out[:, :, 50:].any()
    assert torch.isneginf(lse[:, :, 50:]).all()
    assert torch.isfinite(lse[:, :, :50]).all()
    whole = torch.where(torch.isneginf(lse), 0.0, lse)  # as the other keys have it
    dq, dk, dv = attend_backward(grad, (q, k, v), out, whole, is_causal=False, starts_BS=starts)
    assert not dq[:, :, 50:].any()
    few = attend_backward(grad[:, :, :50], (q[:, :, :50], k, v), out[:, :, :50], lse[:, :, :50], is_causal=False,
                          starts_BS=starts[:, :50])  # fmt: skip
    for mine, other in zip((dq[:, :, :50], dk, dv), few, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("length", [128, 2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_long_sequences_lose_no_digits(length):
    case = Case(batch=1, heads=1, kv_heads=1, queries=length, keys=length, width=64)
    for name, error in zip(NAMES, errors(found(case, torch.float32), expected(case)(torch.float32)), strict=True):
        assert error <= 3e-6, (name, error)


def test_what_it_is_given_may_lie_anywhere():
    """Slices of larger tensors, and heads before tokens."""
    case = Case(queries=40, keys=40)
    whole = [torch.cat([x, x.flip(2)], dim=2) for x in case.inputs(torch.bfloat16)]
    assert all(x.is_contiguous() for x in whole)
    ours, plain = found(case, torch.bfloat16, [x[:, :, :40] for x in whole]), found(case, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_threads_change_no_bit(monkeypatch):
    ours = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        ours.append(found(CASES[1], torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(*ours, strict=True))


@pytest.mark.parametrize("late", [-1, 1])
def test_a_document_that_starts_one_token_off_is_seen(monkeypatch, late):
    case = replace(CASES[1])
    wanted = expected(case)(torch.float32)
    shifted = (case.starts + late).clamp(min=0)
    shifted = torch.where(case.starts > 0, torch.minimum(shifted, torch.arange(case.queries)), case.starts)
    monkeypatch.setattr(Case, "starts", shifted)
    assert min(errors(found(case, torch.float32), wanted)) > 100 * ALLOWED[torch.float32]


def test_other_tensors_are_left_to_torch():
    q = torch.randn(1, 2, 8, 24)
    assert not takes(q)
    assert not takes(q[..., :16].double())
    assert not takes(q[..., :16], q[..., :16].bfloat16())
    assert not takes(torch.randn(1, 2, 16, 8).mT)
    assert takes(q[..., :16])


def test_long_sums_round_no_more_than_torch_s():
    """A key's gradient sums over thousands of queries: block by block, it loses no more than torch's own."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2048, 1, 64).transpose(1, 2) for _ in "qkvg")
    exact, plain = ([x.to(dtype).requires_grad_() for x in (q, k, v)] for dtype in (torch.float64, torch.float32))
    outs = [F.scaled_dot_product_attention(*leaves, is_causal=True) for leaves in (exact, plain)]
    rights, theirs = (
        [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
        for out, leaves in zip(outs, (exact, plain), strict=True)
    )
    out, lse = attend(q, k, v, is_causal=True)
    ours = [out, *attend_backward(grad, (q, k, v), out, lse, is_causal=True)]
    for mine, other, right in zip(ours, theirs, rights, strict=True):
        assert (mine - right).abs().mean() < 1.2 * (other - right).abs().mean()
