"""Checksums against Python's own integers, and what they see."""

from __future__ import annotations

import random

import pytest
import torch

from superstep.kernels import checksum as module
from superstep.kernels import compile_cpp
from superstep.kernels.checksum import BLOCK, checksum, copy_summed, reference, word_sum

SIZES = [0, 1, 37, 4096, 4097, 3 * 4096 + 5]


def _plainly(values, first=0):
    total = sum(word * (2 * (first + i) + 1) for i, word in enumerate(values.view(torch.int32).flatten().tolist()))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first", [0, 5, 2**33 + 1])
def test_the_kernel_and_torch_agree_with_the_formula(size, first):
    assert module.compile_library().library is not None, module.compile_library().why
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    into = torch.full_like(values, float("nan"))
    found = int(checksum(values, first)), int(reference(values, first)), int(copy_summed(into, values, first))
    assert set(found) == {_plainly(values, first)}
    assert int(word_sum(values)) == sum(values.view(torch.int32).tolist())
    assert torch.equal(into, values)


def test_without_a_compiler_the_sums_are_the_same(monkeypatch):
    values = torch.randn(BLOCK + 9, generator=torch.Generator().manual_seed(0))
    by_kernel = int(checksum(values, 3))
    monkeypatch.setattr(module, "compile_library", lambda: compile_cpp.BuildResult(None, "there is no compiler"))
    into = torch.empty_like(values)
    assert int(word_sum(values)) == int(values.view(torch.int32).long().sum())
    assert int(checksum(values, 3)) == int(copy_summed(into, values, 3)) == by_kernel
    assert torch.equal(into, values)


def test_parts_add_up_to_the_whole():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    whole = int(checksum(values))
    parts = [int(checksum(values[low:high], low)) for low, high in ((7000, 10_000), (0, 37), (37, 7000))]
    assert (sum(parts) - whole) % 2**64 == 0


def test_flips_and_words_that_change_places_are_seen():
    draw = random.Random(2)
    values = torch.randn(9001, generator=torch.Generator().manual_seed(2))
    values[5] = float("nan")
    before = int(checksum(values))
    bits = values.view(torch.int32)
    every = [((at, bit),) for at in (0, 5, 4095, 4096, 9000) for bit in range(32)]
    pairs = [((draw.randrange(9001), bit), (draw.randrange(9001), bit)) for bit in range(32) for _ in range(20)]
    for flips in every + pairs:
        changed = bits.clone()
        for at, bit in flips:
            changed[at] ^= -(2**31) if bit == 31 else 2**bit
        assert torch.equal(changed, bits) or int(checksum(changed)) != before, flips
    for _ in range(100):
        one, other = draw.sample(range(9001), 2)
        changed = bits.clone()
        changed[[one, other]] = bits[[other, one]]
        assert torch.equal(changed, bits) or int(checksum(changed)) != before
