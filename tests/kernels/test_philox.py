"""Philox 4x32-10: the published vectors, one stream of bits in torch and C++, and dropout by it."""

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from superstep.kernels import cpu_library, philox
from superstep.kernels.philox import WORDS, Counter, drop, random_words, reference, reference_drop

COUNTER = Counter(key=0xA4093822299F31D0, step=7, sample=3)
FAR = 2**34 + 3
"""An element beyond the reach of one word of the counter."""
FIRSTS = torch.tensor([0, 5, FAR, 1000])

VECTORS = [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((WORDS - 1,) * 4, (WORDS - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Of Random123, kat_vectors, philox 4x32 10."""


@pytest.fixture(params=["C++", "torch"])
def implementation(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cpu_library, "is_compiled", lambda: False)
    elif not cpu_library.is_compiled():
        pytest.skip(cpu_library.compile_library().why)


def unsigned(words):
    return words.long() % WORDS


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_the_published_vectors(counter, key, words):
    assert " ".join(f"{word:08x}" for word in philox.philox(torch.tensor(counter), key).tolist()) == words


def test_an_element_has_its_word_of_its_counter(implementation):
    wanted = [int(word, 16) for word in VECTORS[0][2].split()]
    found = random_words(Counter(key=0, step=0, sample=0), torch.tensor([0, 1]), 1, 4)
    assert unsigned(found[0, 0]).tolist() == wanted
    assert unsigned(found[0, 1, :3]).tolist() == wanted[1:]


@pytest.mark.parametrize("width", [1, 3, 64, 67, 5000])
def test_the_words_of_any_part_are_those_of_the_reference(implementation, width):
    found = random_words(COUNTER, FIRSTS, 2, width)
    assert found.dtype == torch.int32
    assert torch.equal(unsigned(found), reference(COUNTER, FIRSTS, 2, width))
    whole = random_words(COUNTER, torch.tensor([0]), 2, 1000 + width)
    assert torch.equal(found[:, 3], whole[:, 0, 1000:])
    assert torch.equal(found[:, 1], whole[:, 0, 5 : 5 + width])
    (second,) = random_words(replace(COUNTER, sample=4), FIRSTS, 1, width)
    assert torch.equal(found[1], second)


def test_torch_draws_large_tensors_in_blocks(monkeypatch):
    whole = reference(COUNTER, FIRSTS, 2, 500)
    monkeypatch.setattr(philox, "BLOCK", 77)
    assert torch.equal(reference(COUNTER, FIRSTS, 2, 500), whole)
    assert reference(COUNTER, FIRSTS, 2, 0).shape == (2, 4, 0)


def test_threads_draw_the_same():
    before = torch.get_num_threads()
    alone = random_words(COUNTER, FIRSTS, 2, 20000)
    torch.set_num_threads(2)
    try:
        assert torch.equal(random_words(COUNTER, FIRSTS, 2, 20000), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("part", ["key", "step", "sample"])
def test_every_part_of_a_place_changes_the_words(part):
    other = replace(COUNTER, **{part: getattr(COUNTER, part) + 1})
    one, two = (unsigned(random_words(place, FIRSTS[:1], 1, 4000)) for place in (COUNTER, other))
    assert int((one == two).sum()) == 0
    # Half of the bits differ: the sum of 128,000 fair coins, six standard deviations wide.
    bits = sum(int(((one ^ two) >> bit & 1).sum()) for bit in range(32))
    assert abs(bits - 64_000) < 6 * math.sqrt(128_000) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "spread"), [(1, 1), (70, 1), (5000, 1), (1, 300), (5, 7), (3, 16)])
def test_dropout_is_the_references(implementation, dtype, width, spread):
    x = torch.randn(2, 4, width * spread, generator=torch.Generator().manual_seed(0)).to(dtype)
    for p in (0.1, 0.5, 0.9):
        found = drop(x, COUNTER, FIRSTS, p, spread=spread)
        assert torch.equal(found, reference_drop(x, COUNTER, FIRSTS, round(p * WORDS), spread=spread))
        is_kept = unsigned(random_words(COUNTER, FIRSTS, 2, width)) >= p * WORDS
        assert torch.equal(found != 0, is_kept.repeat_interleave(spread, -1) & (x != 0))
        torch.testing.assert_close(found[found != 0], (x / (1 - p))[found != 0])


@pytest.mark.parametrize("p", [0.0, 1e-12, 1.0])
def test_nothing_and_all_are_dropped(implementation, p):
    x = torch.randn(2, 40, requires_grad=True)
    out = drop(x, COUNTER, FIRSTS[:1], p)
    out.sum().backward()
    assert torch.equal(out, x * (p < 1))
    assert torch.equal(x.grad, torch.full_like(x, p < 1))


def test_the_gradient_is_the_mask_over_the_kept_share_and_keeps_nothing(implementation):
    x = torch.randn(2, 4, 100, dtype=torch.float32, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = drop(x, COUNTER, FIRSTS, 0.25)
    assert [t.shape for t in kept] == [FIRSTS.shape]
    grad = torch.randn(100).expand_as(x)
    (dx,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(dx, torch.where(out != 0, grad * (1 / 0.75), 0.0))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_dropped_share_is_within_its_binomial_interval(p):
    count = 10**6
    dropped = int((drop(torch.ones(1, count), COUNTER, FIRSTS[:1], p) == 0).sum())
    assert abs(dropped - count * p) < 5 * math.sqrt(count * p * (1 - p))


def test_shapes_are_known_without_memory():
    with FakeTensorMode():
        x = torch.empty(2, 8, 16).transpose(1, 2)
        out = drop(x, COUNTER, torch.empty(1, dtype=torch.long), 0.5)
        words = random_words(COUNTER, torch.empty(3, dtype=torch.long), 2, 5)
    assert (out.shape, out.is_contiguous()) == ((2, 16, 8), True)
    assert (words.shape, words.dtype) == ((2, 3, 5), torch.int32)
