"""Attention as a GPU computes it without Triton, trained and served: by torch's kernels, which CUDA's rules bind."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import small
from operators import SCORES, Operators
from strict_ranks import device_module
from superstep.comm.device import Device
from superstep.cost.program.memory.activations import unit_bytes
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.attention.document_attention import DocumentAttend, document_attention
from superstep.model.decoder import flash
from superstep.plan.model.attention_rule import AttentionRule
from superstep.plan.resolution.resolve import resolve
from superstep.serve.compute.flat_batch import RequestRows
from superstep.serve.compute.kv_cache import FEW, KvCache
from superstep.serve.compute.paged_attention import PagedAttention

pytestmark = pytest.mark.strict

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

S = 40
"""Tokens: more than a window, and no multiple of it."""
STARTS = torch.tensor([0] * 13 + [13] * 27).expand(2, S)
ATTENDS = {
    "whole": flash,
    "window": partial(flash, rule=AttentionRule(window=16)),
    "block": DocumentAttend(),
    "documents": DocumentAttend(STARTS),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
def test_its_results_lie_as_a_compiler_expects(dtype, starts):
    """The sums of scores too, of which a kernel in fp32 has more than there are tokens."""
    qkv = [drawn(heads, 16, DTYPES[dtype], heads).to(GPU) for heads in (4, 2, 2)]
    strides = []
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            results = document_attention(*qkv, starts, None, None, is_compiled=False)
        strides.append([x.stride() for x in results])
    assert strides[0] == strides[1]


def drawn(heads, width, dtype, seed):
    return torch.randn(2, S, heads, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attended(attend, heads, width, dtype, place):
    """The output, and the gradients of queries, keys and values."""
    query_heads, key_heads = heads
    counts = (query_heads, key_heads, key_heads)
    q, k, v = (drawn(n, width, dtype, seed).to(place).requires_grad_() for seed, n in enumerate(counts))
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), drawn(query_heads, width, dtype, 3).to(place))]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("width", [16, 6, 264])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("attend", ATTENDS)
def test_no_scores_are_made_whole(attend, heads, width, dtype):
    given = ATTENDS[attend], heads, width, dtype
    with Operators() as operators:
        found = attended(*given, GPU)
    assert not SCORES & set(operators.called)
    # Gradients of four query heads are each rounded to bf16 before a key head has their sum.
    precision = 1e-5 if dtype == torch.float32 else 5e-2
    for mine, cpus in zip(found, attended(*given, CPU), strict=True):
        torch.testing.assert_close(mine.cpu(), cpus, rtol=precision, atol=precision)


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_every_query_head_are_counted_where_they_are_kept(window, dtype):
    run = run_of(window, dtype)
    counted = [unit_bytes(one)[1].kept_all for one in (run, with_kept(run, Device("cuda", 0)))]
    here_bytes, there_bytes = (kept_bytes(partial(flash, rule=run.shape.rule(0)), run, place) for place in (CPU, GPU))
    # The efficient kernel keeps two numbers of a seed for each block of a window, whose masks have rows of 16 numbers.
    assert there_bytes - here_bytes == pytest.approx(counted[1] - counted[0], abs=160)
    assert (counted[1] > counted[0]) == (dtype == "fp32" or window is not None)


def run_of(window, dtype):
    """Of two query heads for each key head, with sequences of twice the window."""
    config = small.config(layers=1, sequences=1, microbatch=1, compute=dtype, packed=False, kernels="torch")
    model = replace(config.model, kv_heads=4, head_dim=16)
    run = resolve(replace(config, model=model, data=replace(config.data, sequence_tokens=64)))
    return replace(run, decoder=replace(run.decoder, window=window))


def kept_bytes(attend, run, place):
    """Bytes that attention keeps of one sequence for its backward pass."""
    shape, kept = run.shape, {}
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    of = {"dtype": DTYPES[run.config.numerics.compute], "device": place, "requires_grad": True}
    q, k, v = (torch.randn(1, 64, n, shape.head_dim, **of) for n in counts)

    def keep(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(q, k, v)
    assert out.shape == q.shape
    return sum(storage.nbytes() for storage in kept.values())


# A server's step, in fast mode.

PAGE_TOKENS, LAYER = 16, 1
PROMPT = 5 * FEW
STEPS = {
    "a prompt": [(0, PROMPT)],
    "the rest of a prompt": [(150, PROMPT)],
    "new tokens": [(200, 1), (201, 1), (3, 1)],
    "guesses beside a prompt": [(200, 4), (205, 4), (70, PROMPT)],
}


def served(step, window, dtype, width, heads, place):
    """Of a step, a function that gives how its layers attend, and one that gives what such a layer has mixed."""
    parts, page = [], 0
    for first, count in step:
        pages = -(-(first + count) // PAGE_TOKENS)
        parts.append(RequestRows(first=first, count=count, pages=tuple(range(page, page + pages))))
        page += pages
    store = KvCache(
        layers=2, pages=90, page_tokens=PAGE_TOKENS, kv_heads=heads[1], head_dim=width, dtype=dtype, device=place
    )
    generator = torch.Generator().manual_seed(1)
    for x in (store.keys, store.values):
        x.copy_(torch.randn(x.shape, generator=generator))
    rows = sum(count for _, count in step)
    generator.manual_seed(2)
    counts = (heads[0], heads[1], heads[1])
    q, k, v = (torch.randn(1, rows, n, width, generator=generator).to(place, dtype) for n in counts)
    attention = PagedAttention(store, is_exact=False)
    return lambda: attention(parts)(LAYER), lambda attend: attend(q, k, v, AttentionRule(window=window))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.bfloat16, 16), (torch.bfloat16, 264)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("step", STEPS)
def test_a_server_makes_no_scores_whole_and_does_not_wait(step, window, dtype, width, heads):
    given = STEPS[step], window, dtype, width, heads
    of_layers, mixed = served(*given, GPU)
    device_module().take_host_waits()
    with Operators() as operators:
        found = mixed(of_layers())
    assert device_module().take_host_waits() == {}
    assert not SCORES & set(operators.called)
    precision = 1e-5 if dtype == torch.float32 else 2e-2
    of_layers, mixed = served(*given, CPU)
    torch.testing.assert_close(found.cpu(), mixed(of_layers()), rtol=precision, atol=precision)


def test_the_mask_of_a_long_prompt_is_made_in_pieces():
    of_layers, mixed = served([(0, 1200)], None, torch.bfloat16, 16, (4, 1), GPU)
    with Operators() as operators:
        mixed(of_layers())
    assert 1200 * 64 <= operators.largest < 1200 * 1200 / 2
