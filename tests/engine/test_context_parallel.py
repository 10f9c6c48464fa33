"""Ring attention and Ulysses compute what one process computes, with 1 / cp of its memory and of its work."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longer import many_ranks
from superstep.engine.parallel import flash_partial
from superstep.engine.parallel import ring as ring_attention
from superstep.engine.parallel.ring import RingAttend
from superstep.engine.parallel.ulysses import UlyssesAttend
from superstep.engine.parallel.zigzag import gather_kv, scatter_sum
from superstep.model.decoder import flash
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.sharding.sequence import blocks, cp_of_heads, places, positions

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of one attention; the chunk is of 2 · cp in a sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    chunk: int
    batch: int = 3
    dtype: torch.dtype = torch.float32

    def inputs(self, world):
        """q, k, v and the gradient of the output, whole; the same in every process."""
        generator = torch.Generator().manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, 2 * world * self.chunk, n, self.head_dim) for n in heads]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]


CASES = [
    Case(heads=8, kv_heads=8, head_dim=4, chunk=1),
    Case(heads=8, kv_heads=2, head_dim=16, chunk=3),
    Case(heads=8, kv_heads=1, head_dim=8, chunk=8, batch=1),
    Case(heads=8, kv_heads=4, head_dim=64, chunk=8, dtype=torch.bfloat16),
    Case(heads=16, kv_heads=8, head_dim=32, chunk=3, dtype=torch.bfloat16),
]


def whole(case, world):
    """Output and gradients of one process: by fp32 from the same inputs, and as the case's dtype has them."""
    found = []
    for dtype in (torch.float32, case.dtype):
        *qkv, grad = (x.to(dtype) for x in case.inputs(world))
        qkv = [x.requires_grad_() for x in qkv]
        out = flash(*qkv)
        found.append([x.detach() for x in (out, *torch.autograd.grad(out, qkv, grad))])
    return found


def own(case, rank, world):
    """A rank's part of the inputs."""
    at = list(positions(2 * world * case.chunk, cp=world, rank=rank))
    *qkv, grad = (x[:, at].contiguous() for x in case.inputs(world))
    return [x.requires_grad_() for x in qkv], grad


def attend_own(rank, world, kind, cases, fault=nullcontext):
    """Each case's output and gradients on this rank."""
    found = []
    for case in cases:
        qkv, grad = own(case, rank, world)
        with fault():
            out = kind(dist.group.WORLD)(*qkv)
            found.append([x.detach() for x in (out, *torch.autograd.grad(out, qkv, grad))])
    return found


def error(ours, reference):
    return ((ours.float() - reference).norm() / reference.norm()).item()


def errors(pool, world, kind, cases, **kw):
    """For each case and each of NAMES: the difference from fp32 on one process, and the difference allowed."""
    ranks = pool.run(world, partial(attend_own, **kw), kind, cases)
    for number, case in enumerate(cases):
        order = list(places(2 * world * case.chunk, world))
        exact, plain = whole(case, world)
        for at, name in enumerate(NAMES):
            ours = torch.cat([rank[number][at] for rank in ranks], dim=1)[:, order]
            assert ours.dtype == case.dtype
            # In bf16 the one process has an error itself, that of rounding what goes in and out of each product; the
            # layout may add the rounding of each block's result, and no more.
            bound = 2 * error(plain[at], exact[at]) if case.dtype == torch.bfloat16 else TOLERANCE["fp32"].gradient
            yield case, name, error(ours, exact[at]), bound


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", [RingAttend, UlyssesAttend])
@pytest.mark.parametrize("world", many_ranks([1, 2, 4]))
def test_many_ranks_compute_what_one_process_does(pool, kind, world):
    for case, name, found, bound in errors(pool, world, kind, CASES):
        assert found <= bound, (case, name)


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", [RingAttend, UlyssesAttend])
def test_eight_ranks(pool, kind):
    for case, name, found, bound in errors(pool, 8, kind, CASES[1:2]):
        assert found <= bound, (case, name)


def test_what_ulysses_is_tried_on_is_what_the_plan_allows():
    assert all({1, 2, 4} <= set(cp_of_heads(case.heads, case.kv_heads)) for case in CASES)
    assert 8 in cp_of_heads(CASES[1].heads, CASES[1].kv_heads)


def _mean_of_parts():
    def mean(out, lse, part, part_lse):
        out.lerp_(part.float(), 0.5)
        lse.copy_(torch.logaddexp(lse, part_lse))

    return mock.patch.object(ring_attention, "merge", mean)


def _lse_of_the_own_keys():
    def merge(out, lse, part, part_lse):
        flash_partial.merge(out, lse.clone(), part, part_lse)

    return mock.patch.object(ring_attention, "merge", merge)


def _keys_that_stay():
    start = ring_attention.Hop.start

    def stay(leaving, group, tag):
        return ring_attention.Hop([], leaving) if tag == ring_attention.KEYS_TAG else start(leaving, group, tag)

    return mock.patch.object(ring_attention.Hop, "start", stay)


def _earlier_for_later():
    other = {"own": "own", "earlier": "later", "later": "earlier"}

    def swapped(rank, cp):
        return tuple(replace(block, kind=other[block.kind]) for block in blocks(rank, cp))

    return mock.patch.object(ring_attention, "blocks", swapped)


def _gradients_that_stay():
    start = ring_attention.Hop.start

    def stay(leaving, group, tag):
        return ring_attention.Hop([], leaving) if tag == ring_attention.GRADIENTS_TAG else start(leaving, group, tag)

    return mock.patch.object(ring_attention.Hop, "start", stay)


def _contiguous_order():
    return mock.patch("superstep.engine.parallel.ulysses.in_order", partial(torch.cat, dim=1))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "fault", "wrong"),
    [
        (RingAttend, _mean_of_parts, {"out", "dq", "dk"}),  # the lse is right, and dv follows from it alone
        (RingAttend, _lse_of_the_own_keys, {"out", "dq", "dk", "dv"}),
        (RingAttend, _keys_that_stay, {"out", "dq", "dk", "dv"}),
        (RingAttend, _earlier_for_later, {"out", "dq", "dk", "dv"}),
        (RingAttend, _gradients_that_stay, {"dk", "dv"}),
        (UlyssesAttend, _contiguous_order, {"out", "dq", "dk", "dv"}),
    ],
)
def test_a_planted_fault_is_seen(pool, kind, fault, wrong):
    world = 2 if fault is not _lse_of_the_own_keys else 4
    found = errors(pool, world, kind, CASES[1:2], fault=fault)
    assert {name for _, name, error, bound in found if error > bound} == wrong


def _scores_of_a_rank(rank, world, case):
    """The scores the kernels are asked for, forward and backward."""
    counted = {"forward": 0, "backward": 0}

    def count(pass_, q, k, is_causal):
        queries, keys = q.shape[2], k.shape[2]
        counted[pass_] += queries * (queries + 1) // 2 if is_causal else queries * keys

    def forward(q, k, v, *, is_causal, **how):
        count("forward", q, k, is_causal)
        return flash_partial.attend_block(q, k, v, is_causal=is_causal, **how)

    def backward(grad, inputs, out, lse, *, is_causal, **how):
        count("backward", *inputs[:2], is_causal)
        return flash_partial.attend_block_backward(grad, inputs, out, lse, is_causal=is_causal, **how)

    with (
        mock.patch.object(ring_attention, "attend_block", forward),
        mock.patch.object(ring_attention, "attend_block_backward", backward),
    ):
        attend_own(rank, world, RingAttend, [case])
    return counted


@pytest.mark.multiproc
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_computes_its_share_of_the_scores_and_no_more(pool, world):
    tokens = 2 * world * CASES[1].chunk
    share = sum(block.scores(tokens // world) for block in blocks(0, world))
    assert share * world == tokens * (tokens + 1) // 2
    found = pool.run(world, _scores_of_a_rank, CASES[1])
    assert found == [{"forward": share, "backward": share}] * world


def _bytes_kept(rank, world, kind, case):
    """The bytes that wait for the backward, each storage once."""
    seen = {}

    def pack(x):
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    qkv, _ = own(case, rank, world)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = kind(dist.group.WORLD)(*qkv)
    with torch.no_grad():
        assert torch.equal(out, kind(dist.group.WORLD)(*qkv))
    return sum(seen.values())


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", [RingAttend, UlyssesAttend])
def test_what_is_kept_for_the_backward_falls_as_one_over_cp(pool, kind):
    def kept(world):  # the same sequence over more ranks
        found = set(pool.run(world, _bytes_kept, kind, Case(heads=8, kv_heads=4, head_dim=16, chunk=16 // world)))
        assert len(found) == 1
        return found.pop()

    q = 3 * 32 * 8 * 16 * 4
    lse = q // 16
    assert kept(1) == 2 * q + lse + (2 * q // 2)
    assert kept(1) == 2 * kept(2) == 4 * kept(4)


def _policy(ctx, op, *args, **kw):
    is_kept = op is torch.ops.superstep.ring_attention.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False)


def _recompute_but_attention(fn, *args):
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)


def _compiled(fn, *args):
    return torch.compile(fn, backend="aot_eager", fullgraph=True)(*args)


def _wrapped(rank, world, kind, wrapper, case):
    """Gradients with and without the wrapper, and how many blocks were computed forward in the wrapper."""
    qkv, grad = own(case, rank, world)
    attend = kind(dist.group.WORLD)

    def layer(q, k, v):
        return attend(q * 2, k * 2, v * 2) * 3

    with mock.patch.object(ring_attention, "attend_block", wraps=flash_partial.attend_block) as block:
        ours = torch.autograd.grad(wrapper(layer, *qkv), qkv, grad)
    plain = torch.autograd.grad(layer(*qkv), qkv, grad)
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)), block.call_count


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "wrapper", "blocks_of_a_rank"),
    [
        (RingAttend, _recompute_all, 4),
        (RingAttend, _recompute_but_attention, 2),
        (RingAttend, _compiled, 2),
        (UlyssesAttend, _recompute_all, 0),
        (UlyssesAttend, _recompute_but_attention, 0),
    ],
)
def test_recompute_and_the_compiler_change_no_bit(pool, kind, wrapper, blocks_of_a_rank):
    assert pool.run(2, _wrapped, kind, wrapper, CASES[1]) == [(True, blocks_of_a_rank)] * 2


def _gathered_and_summed(rank, world, tokens):
    """Both helpers on numbers that say where they come from."""
    at = list(positions(tokens, cp=world, rank=rank))
    found = []
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        sequence = torch.arange(2 * tokens * 3, dtype=dtype).view(2, tokens, 3, 1) % 64
        found.append(torch.equal(gather_kv(sequence[:, at], dist.group.WORLD), sequence))
        summed = scatter_sum(sequence * 2**rank, dist.group.WORLD)
        found.append(torch.equal(summed, sequence[:, at] * (2**world - 1)) or dtype == torch.bfloat16)
    big = torch.full((1, tokens, 1, 1), 2**52 + 1)
    found.append(bool((scatter_sum(big, dist.group.WORLD) == world * (2**52 + 1)).all()))
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gathering_is_in_order_and_its_transpose_sums(pool, world):
    assert all(all(found) for found in pool.run(world, _gathered_and_summed, 6 * world))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 4), (8, 2, 64)])
def test_parts_of_the_keys_make_the_whole_both_ways(device, dtype, name, heads, kv_heads, head_dim):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    q, grad = (torch.randn(2, heads, 10, head_dim, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, 7, head_dim, device=device, dtype=dtype) for _ in range(2))
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(*exact, enable_gqa=True)
    expected = [whole, *torch.autograd.grad(whole, exact, grad.float())]

    parts = [(k[:, :, :3], v[:, :, :3]), (k[:, :, 3:], v[:, :, 3:])]
    (out, lse), second = [flash_partial.attend_block(q, *part, is_causal=False) for part in parts]
    out, lse = out.float(), lse.clone()
    flash_partial.merge(out, lse, *second)
    shares = [
        flash_partial.attend_block_backward(grad, (q, *part), out.to(dtype), lse, is_causal=False) for part in parts
    ]
    dq = shares[0][0] + shares[1][0]
    found = [out, dq, *(torch.cat([share[at] for share in shares], dim=2) for at in (1, 2))]
    for ours, reference in zip(found, expected, strict=True):
        assert error(ours, reference) <= TOLERANCE[name].gradient
