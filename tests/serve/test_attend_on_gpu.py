"""Attention of a server's step as a GPU computes it in fast mode: by torch's kernels, which CUDA's rules bind."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_rules import as_cuda
from superstep.serve.compute.attend import PagedAttention
from superstep.serve.compute.keys import FEW, KeyStore
from superstep.serve.compute.rows import Part

PAGE_TOKENS, LAYER = 16, 1
PROMPT = 5 * FEW
STEPS = {
    "a prompt": [(0, PROMPT)],
    "the rest of a prompt": [(150, PROMPT)],
    "new tokens": [(200, 1), (201, 1), (3, 1)],
    "guesses beside a prompt": [(200, 4), (205, 4), (70, PROMPT)],
}


def filled(dtype, width, key_heads):
    store = KeyStore(layers=2, pages=90, page_tokens=PAGE_TOKENS, kv_heads=key_heads, head_dim=width, dtype=dtype,
                     device=torch.device("cpu"))  # fmt: skip
    drawn = torch.Generator().manual_seed(1)
    for x in (store.keys, store.values):
        x.copy_(torch.randn(x.shape, generator=drawn))
    return store


def attended(step, window, dtype, width, heads):
    """The mixed values of a step."""
    parts, page = [], 0
    for first, count in step:
        pages = -(-(first + count) // PAGE_TOKENS)
        parts.append(Part(first=first, count=count, pages=tuple(range(page, page + pages))))
        page += pages
    drawn = torch.Generator().manual_seed(2)
    rows = sum(count for _, count in step)
    q, k, v = (torch.randn(1, rows, n, width, generator=drawn).to(dtype) for n in (heads[0], heads[1], heads[1]))
    attend = PagedAttention(filled(dtype, width, heads[1]), window=window, is_exact=False)(parts)(LAYER)
    return attend(q, k, v)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.bfloat16, 16), (torch.bfloat16, 264)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("step", STEPS)
def test_no_scores_are_made_whole(step, window, dtype, width, heads):
    given = STEPS[step], window, dtype, width, heads
    wanted = attended(*given)
    with as_cuda() as seen:
        found = attended(*given)
    assert seen.whole_scores == []
    assert seen.waits == []
    precision = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=precision, atol=precision)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_the_mask_of_a_long_prompt_is_made_in_pieces():
    with as_cuda(), Largest() as largest:
        attended([(0, 1200)], None, torch.bfloat16, 16, (4, 1))
    assert 1200 * 64 <= largest.numbers < 1200 * 1200 / 2
