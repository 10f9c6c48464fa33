"""Every implementation of attention adds a layer's position bias, and gives its exact gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from superstep.engine.attention.document_attention import DocumentAttend
from superstep.engine.exact.attention import ExactAttend, WholeSequence
from superstep.engine.exact.position_bias import exact_position_bias
from superstep.engine.layers.grad_accumulation import GradientSink, GradientSums
from superstep.engine.parallel.ring import RingAttend
from superstep.engine.parallel.ulysses import UlyssesAttend
from superstep.kernels.position_bias import t5_buckets
from superstep.model.decoder import flash
from superstep.model.position_bias import BucketBias, RelativeBias, make_position_bias
from superstep.numerics.fixed_point import ACTIVATION, PARAMETER
from superstep.plan.config import ModelConfig
from superstep.plan.model.attention_rule import AttentionRule
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.sharding.sequence import positions as places_of

TOKENS, BATCH, CHUNKS, HEADS, KV_HEADS, WIDTH, FARTHEST = 300, 2, 4, 4, 2, 16, 40
POSITIONS = ("alibi", "t5", "relative")
STARTS = torch.tensor([0] * 130 + [130] * 20 + [150] * 150).expand(BATCH, TOKENS)
TOKENS_OF_RANKS = 296
WAYS = ("fused", "kernel", "exact")


def numbers():
    random = torch.Generator().manual_seed(0)
    counts = HEADS, KV_HEADS, KV_HEADS, HEADS
    q, k, v, grad = (torch.randn(BATCH, TOKENS, n, WIDTH, generator=random) * 2 for n in counts)
    return q, k, v, grad / 100  # exact sums have room for gradients, which are small


def module(positions):
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH}
    made = make_position_bias(shape_of(ModelConfig(positions=positions, max_distance=FARTHEST, **sizes)))
    if positions != "alibi":
        with torch.no_grad():
            made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(1)))
    return made


def textbook(positions, made, q, k, v, starts, window, cap):
    """Attention from all scores at once, with a bias for every pair of a query and a key."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
    scores = torch.einsum("bsnh,btnh->bnst", q, k) / WIDTH**0.5
    place = torch.arange(q.shape[1])
    behind = place[:, None] - place
    near = behind.clamp(0, FARTHEST)
    if positions == "alibi":
        scores = scores - torch.tensor([2.0 ** (-2 * n) for n in range(1, 5)])[:, None, None] * behind
    elif positions == "t5":
        scores = scores + made.weight.to(q.dtype)[:, t5_buckets(32, FARTHEST)[near]]
    else:
        vectors = made.weight.to(q.dtype).view(HEADS, WIDTH, FARTHEST + 1)[..., near]
        scores = scores + torch.einsum("bsnh,nhst->bnst", q, vectors) / WIDTH**0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    hidden = behind < 0
    if window:
        hidden = hidden | (behind >= window)
    if starts is not None:
        hidden = hidden | (place < starts[:, None, :, None])
    return torch.einsum("bnst,btnh->bsnh", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def grads(out, grad, qkv, made):
    of = [*qkv, *(() if made is None else made.parameters())]
    return [out.detach().double(), *(x.double() for x in torch.autograd.grad(out, of, grad))]


def by_engine(way, positions, starts, rule):
    q, k, v, grad = numbers()
    made, qkv = module(positions), [x.requires_grad_() for x in (q, k, v)]
    if way != "exact":
        attend = DocumentAttend(starts, way == "kernel") if starts is not None or way == "kernel" else flash
        return grads(attend(*qkv, rule, made(q)), grad, qkv, made)
    attend = ExactAttend(range(CHUNKS), WholeSequence(), ACTIVATION.of(CHUNKS, "a key", None), starts)
    if positions == "alibi":
        return grads(attend(*qkv, rule, made(q)), grad, qkv, None)
    sink = GradientSink(
        torch.zeros(made.weight.shape, dtype=torch.int64), PARAMETER.of(1024, "a bias", None), GradientSums()
    )
    found = grads(attend(*qkv, rule, exact_position_bias(made, sink)(q)), grad, qkv, None)
    return [*found, PARAMETER.take(sink.into).double()]


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=37), AttentionRule(window=37, soft_cap=3.0)])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_bias_is_that_of_the_textbook(way, positions, rule, starts):
    found = by_engine(way, positions, starts, rule)
    made, (q, k, v, grad) = module(positions), (x.double() for x in numbers())
    qkv = [x.requires_grad_() for x in (q, k, v)]
    out = textbook(positions, made, *qkv, starts, rule.window, rule.soft_cap)
    for mine, theirs in zip(found, grads(out, grad, qkv, made), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=3e-5)


def on_a_rank(rank, world, kind, positions, starts, rule):
    """This rank's output and gradients, in the order in which it holds its tokens."""
    made = module(positions)
    at = list(places_of(TOKENS_OF_RANKS, cp=world, rank=rank))
    q, k, v, grad = (x[:, :TOKENS_OF_RANKS][:, at] for x in numbers())
    qkv = [x.requires_grad_() for x in (q, k, v)]
    group = dist.group.WORLD
    attend = RingAttend(group, starts) if kind == "ring" else UlyssesAttend(group, DocumentAttend(starts))
    return grads(attend(*qkv, rule, made(q)), grad, qkv, made)


@pytest.mark.multiproc
@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=37, soft_cap=3.0)])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_ranks_that_share_a_sequence_compute_what_one_does(pool, kind, positions, rule, starts):
    """Each rank's gradient of the bias is its share, and the sum is that of all."""
    starts = None if starts is None else starts[:, :TOKENS_OF_RANKS]
    ranks = pool.run(2, on_a_rank, kind, positions, starts, rule)
    made, (q, k, v, grad) = module(positions), (x[:, :TOKENS_OF_RANKS].double() for x in numbers())
    qkv = [x.requires_grad_() for x in (q, k, v)]
    whole = grads(textbook(positions, made, *qkv, starts, rule.window, rule.soft_cap), grad, qkv, made)
    order = [place for rank in range(2) for place in places_of(TOKENS_OF_RANKS, cp=2, rank=rank)]
    for number, theirs in enumerate(whole):
        parts = [rank[number] for rank in ranks]
        if number < 4:  # the output, and the gradients of q, k and v
            theirs, mine = theirs[:, order], torch.cat(parts, dim=1)
        else:
            mine = sum(parts)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=3e-5)


def test_a_table_of_t5_has_the_bucket_of_each_distance():
    made = BucketBias(2, FARTHEST)
    with torch.no_grad():
        made.weight.copy_(torch.arange(64.0).view(2, 32))
    assert made(made.weight).table[0].tolist() == t5_buckets(32, FARTHEST).tolist()


def test_a_head_has_vectors_of_its_own():
    made = RelativeBias(2, 4, 5)
    assert made(made.weight).table.shape == (2, 4, 6)
    assert made(made.weight).of_heads(1, 1).table.shape == (1, 4, 6)
