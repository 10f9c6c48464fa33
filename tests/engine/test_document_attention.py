"""Attention within documents: what a dense mask gives in fp64, for each way to attend and each gradient."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from superstep.engine.attention import document_attention
from superstep.engine.attention.choose_attention import GatheredKeys
from superstep.engine.attention.document_attention import DocumentAttend
from superstep.engine.exact.attention import ExactAttend, WholeSequence
from superstep.engine.parallel import flash_varlen, ring
from superstep.engine.parallel.ring import RingAttend
from superstep.engine.parallel.ulysses import UlyssesAttend
from superstep.kernels import attention as kernel
from superstep.model.decoder import flash
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.model.attention_rule import AttentionRule
from superstep.plan.sharding.sequence import places, positions

NAMES = ("out", "dq", "dk", "dv")
TOKENS = 32
# Chunks of 4 ranks are of 4 tokens, those of 2 ranks of 8: documents end at their edges and one token beside, are
# of one token, span several chunks, and one row has no more than one.
ROWS = ([0, 3, 4, 5, 8, 9, 23, 24, 31], [0], [0, 7, 12, 16, 17, 25], [0, *range(1, TOKENS)])


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of one attention."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32

    def inputs(self):
        """q, k, v and the gradient of the output, whole; the same in every process."""
        generator = torch.Generator().manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(len(ROWS), TOKENS, n, self.head_dim) for n in heads]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]


CASES = [Case(), Case(heads=8, kv_heads=8, head_dim=4), Case(kv_heads=4, head_dim=64, dtype=torch.bfloat16)]


def starts():
    """[B, S]: where each token's document starts."""
    rows = [[max(first for first in row if first <= at) for at in range(TOKENS)] for row in ROWS]
    return torch.tensor(rows)


def dense(case, dtype=torch.float64):
    """Output and gradients by a softmax under a mask that is written out."""
    *qkv, grad = (x.to(dtype) for x in case.inputs())
    q, k, v = (x.requires_grad_() for x in qkv)
    at = torch.arange(TOKENS)
    sees = (at[:, None] >= at) & (at >= starts()[..., None])
    keys, values = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, keys) / case.head_dim**0.5
    p = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bnqk,bknh->bqnh", p, values)
    return [x.detach() for x in (out, *torch.autograd.grad(out, (q, k, v), grad))]


def alone(group):
    return DocumentAttend(starts())


def around_a_ring(group):
    return RingAttend(group, starts())


def alone_in_the_kernel(group):
    return DocumentAttend(starts(), is_compiled=True)


def around_a_ring_in_the_kernel(group):
    return RingAttend(group, starts(), is_compiled=True)


def by_heads(group):
    return UlyssesAttend(group, DocumentAttend(starts()))


def exactly(group):
    cp = group.size()
    return ExactAttend(
        positions(16, cp=cp, rank=group.rank()), GatheredKeys(group) if cp > 1 else WholeSequence(), starts=starts()
    )


def exactly_by_heads(group):
    return UlyssesAttend(group, ExactAttend(range(8), WholeSequence(), starts=starts()))


def attend_own(rank, world, kind, cases, fault=nullcontext):
    """Each case's output and gradients on this rank."""
    at, found = list(positions(TOKENS, cp=world, rank=rank)), []
    for case in cases:
        *qkv, grad = (x[:, at].contiguous() for x in case.inputs())
        qkv = [x.requires_grad_() for x in qkv]
        with fault(rank):
            out = kind(dist.group.WORLD)(*qkv)
            found.append([x.detach() for x in (out, *torch.autograd.grad(out, qkv, grad))])
    return found


def errors(pool, world, kind, cases, **kw):
    """For each case and each of NAMES: the difference from the dense mask in fp64, and the difference allowed."""
    ranks = pool.run(world, partial(attend_own, **kw), kind, cases)
    for number, case in enumerate(cases):
        reference = dense(case)
        # In bf16 the dense softmax has an error itself: rounding what goes in and out of each product.
        plain = dense(case, case.dtype) if case.dtype == torch.bfloat16 else None
        for at, name in enumerate(NAMES):
            ours = torch.cat([rank[number][at] for rank in ranks], dim=1)[:, list(places(TOKENS, world))]
            assert ours.dtype == case.dtype
            bound = 2 * error(plain[at], reference[at]) if plain else ALLOWED
            yield case, name, error(ours, reference[at]), bound


ALLOWED = TOLERANCE["fp32"].gradient


def _by_parts(rank):
    """Rows that are narrow are gone through as wide ones are."""
    return mock.patch.object(flash_varlen, "NARROW", 0)


WAYS = dict.fromkeys((alone, around_a_ring, by_heads), (nullcontext, _by_parts))


def error(ours, reference):
    return ((ours.double() - reference).norm() / reference.norm()).item()


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (1, [alone, alone_in_the_kernel, exactly]),
        (2, [around_a_ring, around_a_ring_in_the_kernel, by_heads, exactly, exactly_by_heads]),
        (4, [around_a_ring, around_a_ring_in_the_kernel, by_heads, exactly]),
    ],
)
def test_every_way_to_attend_computes_what_a_dense_mask_gives(pool, world, kinds):
    for kind, way in [(each, way) for each in kinds for way in WAYS.get(each, (nullcontext,))]:
        # Exact mode hands out whole key heads.
        cases = CASES if kind is not exactly_by_heads else [case for case in CASES if case.kv_heads % world == 0]
        for case, name, found, bound in errors(pool, world, kind, cases, fault=way):
            assert found <= bound, (kind.__name__, case, name)


def _shifted(by):
    """Every document begins one token late or early, but for the first."""

    def bounds(starts):
        return [[0, *(at + by for at in row[1:-1] if 0 < at + by < row[-1]), row[-1]] for row in found(starts)]

    found = flash_varlen.bounds
    return bounds


def _one_late(rank):
    return mock.patch.object(ring, "bounds", _shifted(1))


def _one_late_whole(rank):
    return mock.patch.object(document_attention, "bounds", _shifted(1))


def _one_early_in_the_chunks(rank):
    inner = ExactAttend.parts

    def parts(self, chunk, length, sequences):
        return inner(replace(self, starts=(self.starts - 1).clamp_min(0)), chunk, length, sequences)

    return mock.patch.object(ExactAttend, "parts", parts)


def _no_mask_in_one_turn(rank):
    """Of another rank's keys all are seen."""
    inner = ring.rectangles_of
    return mock.patch.object(ring, "rectangles_of", lambda block, tokens, _: inner(block, tokens, None))


def _no_mask_on_one_rank(rank):
    inner = ring.bounds
    return mock.patch.object(ring, "bounds", lambda at: [[0, TOKENS]] * len(at) if rank == 1 else inner(at))


def _no_rectangles(rank):
    return mock.patch.object(ring, "rectangles_of", return_value=())


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (around_a_ring, _one_late),
        (around_a_ring_in_the_kernel, _one_late),
        (around_a_ring, _no_mask_in_one_turn),
        (around_a_ring, _no_mask_on_one_rank),
        (around_a_ring, _no_rectangles),
        (by_heads, _one_late_whole),
        (exactly, _one_early_in_the_chunks),
    ],
)
def test_a_planted_fault_is_seen(pool, kind, fault):
    found = errors(pool, 2, kind, CASES[:1], fault=fault)
    assert {name for _, name, error, bound in found if error > 100 * bound} == set(NAMES)


def _scores_of_a_rank(rank, world, kind, short):
    """The scores that the kernels are asked for."""
    asked = []

    def count(q, k, v, *, is_causal, **how):
        queries, keys = q.shape[2], k.shape[2]
        asked.append(q.shape[0] * (queries * (queries + 1) // 2 if is_causal else queries * keys))
        return inner(q, k, v, is_causal=is_causal, **how)

    inner = flash_varlen.attend_block
    with (
        mock.patch.object(flash_varlen, "attend_block", count),
        mock.patch.object(ring, "attend_block", count),
        mock.patch.object(flash_varlen, "SHORT", short),
        _by_parts(rank),
    ):
        attend_own(rank, world, kind, CASES[:1])
    return sum(asked)


@pytest.mark.multiproc
@pytest.mark.parametrize(("world", "kind"), [(1, alone), (2, around_a_ring), (4, around_a_ring)])
def test_no_score_between_documents_is_computed(pool, world, kind):
    needed = (torch.arange(TOKENS) - starts() + 1).sum().item()
    assert sum(pool.run(world, _scores_of_a_rank, kind, 0)) == needed
    # Short ones are computed beside others of at most twice their length.
    assert needed < sum(pool.run(world, _scores_of_a_rank, kind, flash_varlen.SHORT)) < 4 * needed


def _wrapped(compiled):
    """Gradients of a layer twice, the second time with other documents: how many graphs a compiler makes of it."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def layer(q, k, v, attend):
        return attend(q * 2, k * 2, v * 2) * 3

    found = []
    torch._dynamo.reset()
    run = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False) if compiled else layer
    for at in (starts(), starts().roll(1, 0)):
        *qkv, grad = CASES[0].inputs()
        qkv = [x.requires_grad_() for x in qkv]
        found += torch.autograd.grad(run(*qkv, DocumentAttend(at)), qkv, grad)
    return found, len(graphs)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("tokens", [64, 160], ids=["narrow", "wide"])
@pytest.mark.parametrize("document", [None, 20])
def test_its_results_lie_as_a_compiler_expects(is_compiled, tokens, document):
    """The compiler makes the code that reads them from a fake call, which computes nothing."""
    q, k, v = (torch.ones(2, tokens, heads, 16) for heads in (8, 2, 2))
    places = torch.arange(tokens)
    at = None if document is None else (places - places % document).repeat(2, 1)
    strides = []
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            out, lse = document_attention.document_attention(q, k, v, at, None, None, is_compiled)
            gradients = document_attention._document_attention_backward(out, q, k, v, out, lse, at, None, is_compiled)
        strides.append([x.stride() for x in (out, lse, *gradients)])
    assert strides[0] == strides[1]


def test_a_compiler_makes_one_graph_whatever_the_documents():
    plain, _ = _wrapped(False)
    ours, graphs = _wrapped(True)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert graphs == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_a_dense_mask_gives(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = Case(dtype=dtype)
    *qkv, grad = (x.cuda() for x in case.inputs())
    qkv = [x.requires_grad_() for x in qkv]
    out = DocumentAttend(starts())(*qkv)
    found = [out, *torch.autograd.grad(out, qkv, grad)]
    reference, plain = dense(case), dense(case, dtype)
    for ours, exact, same in zip(found, reference, plain, strict=True):
        allowed = 2 * error(same, exact) if dtype == torch.bfloat16 else ALLOWED
        assert error(ours.detach().cpu(), exact) <= allowed


@pytest.mark.parametrize("window", [1, 5, TOKENS - 1, TOKENS, 100])
@pytest.mark.parametrize("case", [Case(), Case(head_dim=4)], ids=["in the kernel", "by torch"])
def test_a_window_in_the_kernel_is_that_of_the_model(case, window):
    if kernel.compile_library().library is None:
        pytest.skip(kernel.compile_library().why)
    found = []
    for attend, dtype in ((DocumentAttend(is_compiled=True), torch.float32), (flash, torch.float64)):
        *qkv, grad = (x.to(dtype) for x in case.inputs())
        qkv = [x.requires_grad_() for x in qkv]
        out = attend(*qkv, AttentionRule(window=window))
        found.append([x.detach().double() for x in (out, *torch.autograd.grad(out, qkv, grad))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
