"""Philox 4x32-10, random numbers without a state (Salmon 2011), and dropout by them: references and kernels.

A key and a counter of four words give four random words. Here a word belongs to an element of a tensor:

    counter    element // 4 (two words), sample, step        key    of what is drawn: two words
    word       element % 4 of the four

All implementations give the same bits: torch (in int64), C++, and Triton. A part of a tensor is given as rows of
consecutive elements of the whole tensor, with the number of each row's first element:

    B  samples, one after the other    R  rows of a sample    W  elements of a row
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superstep.kernels import cpu_library, triton_loader

WORDS = 2**32
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
"""The golden ratio and the square root of 3, less 1, in 32 bits."""

BLOCK = 2**18
"""Elements that torch draws at once: some ten integers of 64 bits for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """The part of key and counter that the elements of a tensor have in common.

    Attributes:
        key: 64 bits that say what is drawn.
        step: below 2^32.
        sample: of the first of B samples, below 2^32; the others follow it.
    """

    key: int
    step: int
    sample: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Key, step and sample as signed integers of 64 bits, as torch's operators take them."""
        return self.key - 2**64 if self.key >= 2**63 else self.key, self.step, self.sample


def philox(counter: Tensor, key: tuple[Tensor | int, Tensor | int]) -> Tensor:
    """The four words of each counter, [..., 4], as int64 from 0 to 2^32 - 1.

    Args:
        counter: int64 [..., 4], likewise.
        key: two words.
    """
    a, b, c, d = counter.unbind(-1)
    low, high = key
    last = WORDS - 1
    for _ in range(ROUNDS):
        # A product of 64 bits wraps round, and keeps all its bits.
        one, two = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (two >> 32 & last) ^ b ^ low, two & last
        c, d = (one >> 32 & last) ^ d ^ high, one & last
        low, high = low + KEY_STEPS[0] & last, high + KEY_STEPS[1] & last
    return torch.stack((a, b, c, d), -1)


def reference(counter: Counter, first_R: Tensor, samples: int, width: int) -> Tensor:
    """The word of each element, int64 [B, R, W], by torch."""
    element_RW = first_R[:, None] + torch.arange(width, device=first_R.device)
    element = element_RW.expand(samples, *element_RW.shape).flatten()
    sample = torch.arange(samples, device=first_R.device) + counter.sample
    sample = sample.repeat_interleave(element_RW.numel())
    key = counter.key % WORDS, counter.key // WORDS
    parts = []
    for at, n in zip(element.split(BLOCK), sample.split(BLOCK), strict=True):
        block = at // 4
        words = philox(torch.stack((block % WORDS, block // WORDS, n, torch.full_like(n, counter.step)), -1), key)
        parts.append(words.gather(-1, (at % 4)[:, None])[:, 0])
    return torch.cat(parts).view(samples, *element_RW.shape) if parts else element.view(samples, *element_RW.shape)


def random_words(counter: Counter, first_R: Tensor, samples: int, width: int) -> Tensor:
    """``reference`` by a kernel where there is one: int32 [B, R, W] with the words' bits, on the device of
    ``first_R``.
    """
    out: Tensor = _random_words(first_R, *counter.numbers, samples, width)
    return out


def drop(x: Tensor, counter: Counter, first_R: Tensor, p: float, *, spread: int = 1) -> Tensor:
    """x / (1 - p) where kept, else 0: dropout (Hinton 2012). The backward draws the same words again and keeps no mask.

    Args:
        x: fp32 or bf16, the part that has the rows: samples · R · W · ``spread`` elements, samples first.
        counter: of the words.
        first_R: int64 [R], on the device of ``x``.
        p: the share of zeros, from 0 to 1, rounded to a multiple of 2^-32.
        spread: consecutive numbers of ``x`` that share a word.
    """
    threshold = round(p * WORDS)
    if threshold == 0:
        return x
    if threshold == WORDS:
        return x * 0.0
    out: Tensor = _drop(x, first_R, *counter.numbers, spread, threshold)
    return out


def reference_drop(x: Tensor, counter: Counter, first_R: Tensor, threshold: int, *, spread: int = 1) -> Tensor:
    """``drop`` by torch, of the words that are at least the threshold."""
    words = reference(counter, first_R, len(x), x[0].numel() // (len(first_R) * spread))
    is_kept = (words >= threshold)[..., None].expand(*words.shape, spread).reshape(x.shape)
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(is_kept, wide * _scale(threshold), 0.0).to(x.dtype)


def _scale(threshold: int) -> float:
    return WORDS / (WORDS - threshold)


@torch.library.custom_op("superstep::random_words", mutates_args=())
def _random_words(first: Tensor, key: int, step: int, sample: int, samples: int, width: int) -> Tensor:
    counter = Counter(key=key % 2**64, step=step, sample=sample)
    if first.is_cuda and not triton_loader.missing(first.device):
        out: Tensor = triton_loader.module("philox").random_words(counter, first, samples, width)
        return out
    if first.device.type == "cpu" and cpu_library.is_compiled():
        out = torch.empty(samples, len(first), width, dtype=torch.int32)
        cpu_library.run("random_words", key, step, sample, first, samples, len(first), width, out)
        return out
    words = reference(counter, first, samples, width)
    return torch.where(words < WORDS // 2, words, words - WORDS).to(torch.int32)


@_random_words.register_fake
def _(first: Tensor, key: int, step: int, sample: int, samples: int, width: int) -> Tensor:
    return first.new_empty((samples, len(first), width), dtype=torch.int32)


@torch.library.custom_op("superstep::drop", mutates_args=())
def _drop(x: Tensor, first: Tensor, key: int, step: int, sample: int, spread: int, threshold: int) -> Tensor:
    x, counter = x.contiguous(), Counter(key=key % 2**64, step=step, sample=sample)
    shape = len(x), len(first), math.prod(x.shape[1:]) // (len(first) * spread)
    if x.is_cuda and not triton_loader.missing(x.device):
        drop_by_triton = triton_loader.module("philox").drop
        out: Tensor = drop_by_triton(x, counter, first, shape, spread, threshold, _scale(threshold))
        return out
    if cpu_library.takes(x) and cpu_library.is_compiled():
        out, is_bf16 = torch.empty_like(x), x.dtype == torch.bfloat16
        numbers = spread, threshold, _scale(threshold)
        cpu_library.run("drop", is_bf16, key, step, sample, first, *shape, x, out, *numbers)
        return out
    return reference_drop(x, counter, first, threshold, spread=spread)


@_drop.register_fake
def _(x: Tensor, first: Tensor, key: int, step: int, sample: int, spread: int, threshold: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    _, first, *ctx.numbers = inputs
    ctx.save_for_backward(first)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    dx: Tensor = _drop(grad, *ctx.saved_tensors, *ctx.numbers)
    return dx, *[None] * (1 + len(ctx.numbers))


_drop.register_autograd(_backward, setup_context=_keep)
