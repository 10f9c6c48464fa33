"""Philox 4x32-10 and dropout by it, with the bits of ``kernels.philox``: each number read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from superstep.kernels.philox import Counter

NUMBERS = 1024
"""Numbers of a program."""
FEW = 16
"""Words of a program where each decides on many numbers."""


@triton.jit
def _draw(low, high, step, sample, firsts, samples, rows, width, WORDS: tl.constexpr):
    """The words of a program, their places in [samples, rows, width], and which of them are there."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(firsts + row % rows)
    block = first // 4 + tl.program_id(1).to(tl.int64) * (WORDS // 4) + tl.arange(0, WORDS // 4)
    nothing = tl.zeros([WORDS // 4], tl.int64)
    a, b, c, d = philox_impl(
        (block & 0xFFFFFFFF).to(tl.uint32),
        (block >> 32).to(tl.uint32),
        (nothing + sample + row // rows).to(tl.uint32),
        (nothing + step).to(tl.uint32),
        (nothing + low).to(tl.uint32),
        (nothing + high).to(tl.uint32),
        10,
    )
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [WORDS])
    at = first // 4 * 4 - first + tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return words, row * width + at, (at >= 0) & (at < width)


@triton.jit
def _random_words(out, low, high, step, sample, firsts, samples, rows, width, WORDS: tl.constexpr):
    words, at, is_there = _draw(low, high, step, sample, firsts, samples, rows, width, WORDS)
    tl.store(out + at, words.to(tl.int32, bitcast=True), mask=is_there)


@triton.jit
def _drop(
    x, out, low, high, step, sample, firsts, samples, rows, width, spread, threshold, scale, WORDS: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    words, at, is_there = _draw(low, high, step, sample, firsts, samples, rows, width, WORDS)
    is_kept = (words.to(tl.int64) >= threshold)[:, None]
    for begin in range(0, spread, SPREAD):
        number = begin + tl.arange(0, SPREAD)[None, :]
        place = at[:, None] * spread + number
        mask = is_there[:, None] & (number < spread)
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * scale
        tl.store(out + place, tl.where(is_kept, value, 0.0).to(out.dtype.element_ty), mask=mask)


def random_words(counter: Counter, first_R: Tensor, samples: int, width: int) -> Tensor:
    """The word of each element: int32 [samples, R, width]."""
    shape = samples, len(first_R), width
    out = torch.empty(shape, dtype=torch.int32, device=first_R.device)
    _random_words[_grid(shape, NUMBERS)](out, *_numbers(counter), first_R, *shape, WORDS=NUMBERS)
    return out


def drop(
    x: Tensor,
    counter: Counter,
    first_R: Tensor,
    shape: tuple[int, int, int],
    spread: int,
    threshold: int,
    scale: float,
) -> Tensor:
    """``x · scale`` where the word is at least the threshold, else 0.

    Args:
        x: contiguous.
        counter, first_R: of the words.
        shape: of the words: samples, rows, width.
        spread: consecutive numbers of ``x`` that share a word.
        threshold: from 1 to 2^32 - 1.
        scale: of what is kept.
    """
    out, wide = torch.empty_like(x), spread > 1
    words = FEW if wide else NUMBERS
    _drop[_grid(shape, words)](
        *(x, out, *_numbers(counter), first_R, *shape, spread, threshold, scale),
        WORDS=words,
        SPREAD=NUMBERS // FEW if wide else 1,
    )
    return out


def _grid(shape: tuple[int, int, int], words: int) -> tuple[int, int]:
    """The programs of a launch. A row may begin within a counter's four words, so up to three words more are drawn."""
    samples, rows, width = shape
    return samples * rows, triton.cdiv(width + 3, words)


def _numbers(counter: Counter) -> tuple[int, int, int, int]:
    return counter.key % 2**32, counter.key // 2**32, counter.step, counter.sample
