"""Attention as a GPU computes it without Triton: by torch's kernels, which CUDA's rules bind (``cuda_rules``)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import small
from cuda_rules import OnCuda, as_cuda
from superstep.cost.program.memory import unit_bytes
from superstep.model.decoder import Sliding, attention_of, flash
from superstep.plan.resolve import resolve
from superstep.runtime.documents import DocumentAttend
from superstep.runtime.kept import with_kept

S = 40
"""Tokens: more than a window, and no multiple of it."""
STARTS = torch.tensor([0] * 13 + [13] * 27).expand(2, S)
ATTENDS = {"whole": flash, "window": Sliding(16), "block": DocumentAttend(), "documents": DocumentAttend(STARTS)}


def drawn(heads, width, dtype, seed):
    return torch.randn(2, S, heads, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attended(attend, heads, width, dtype):
    """The output, and the gradients of queries, keys and values."""
    query_heads, key_heads = heads
    q, k, v = (drawn(n, width, dtype, seed).requires_grad_() for seed, n in enumerate((query_heads, *[key_heads] * 2)))
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), drawn(query_heads, width, dtype, 3))]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("width", [16, 6, 264])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", ATTENDS)
def test_no_scores_are_made_whole(attend, heads, width, dtype):
    wanted = attended(ATTENDS[attend], heads, width, dtype)
    with as_cuda() as seen:
        found = attended(ATTENDS[attend], heads, width, dtype)
    assert seen.whole_scores == []
    # Gradients of four query heads are each rounded to bf16 before a key head has their sum.
    precision = 1e-5 if dtype == torch.float32 else 5e-2
    for mine, cpus in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, cpus, rtol=precision, atol=precision)


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_keys_of_every_query_head_are_counted_where_they_are_kept(window, dtype):
    run = run_of(window, dtype)
    there = with_kept(run, OnCuda("cuda", 0))
    counted = [unit_bytes(one)[1].kept_all for one in (run, there)]
    attend = attention_of(run.shape)
    here_bytes = kept_bytes(attend, run)
    with as_cuda():
        there_bytes = kept_bytes(attend, run)
    # The efficient kernel keeps two numbers of a seed, and so does each block of a window.
    assert there_bytes - here_bytes == pytest.approx(counted[1] - counted[0], abs=128)
    assert (counted[1] > counted[0]) == (dtype == "fp32" or window is not None)


def run_of(window, dtype):
    """Of two query heads for each key head, with sequences of twice the window."""
    config = small.config(layers=1, sequences=1, microbatch=1, compute=dtype, packed=False, kernels="torch")
    model = replace(config.model, kv_heads=4, head_dim=16)
    run = resolve(replace(config, model=model, data=replace(config.data, sequence_tokens=64)))
    return replace(run, decoder=replace(run.decoder, window=window))


def kept_bytes(attend, run):
    """Bytes that attention keeps of one sequence for its backward pass."""
    shape, kept = run.shape, {}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[run.config.numerics.compute]
    q, k, v = (
        torch.randn(1, 64, n, shape.head_dim, dtype=dtype, requires_grad=True)
        for n in (shape.heads, *[shape.kv_heads] * 2)
    )

    def keep(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(q, k, v)
    assert out.shape == q.shape
    return sum(storage.nbytes() for storage in kept.values())
