"""Sample order: a pseudo-random permutation that is computed on demand, never stored.

A Feistel network is a bijection for any round function, because every round can be undone::

    left, right  ->  right, left ^ f(right, key)

It permutes [0, 4^h) for halves of h bits. A permutation of [0, length) follows by cycle walking: a result outside is
permuted again until it is inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The domain is less
than four times the length, so that takes fewer than four passes on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Four make a good permutation of a large domain (Luby and Rackoff 1988); small domains need more."""

_WORD = (1 << 64) - 1


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijective hash of 64-bit words: the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permute(positions: NDArray[np.int64], length: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The images of positions under the permutation of [0, length) for (seed, epoch)."""
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    images = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := images >= length).any():
        images[outside] = _feistel(images[outside], half_bits, keys)
    return images.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Order:
    """Samples from a cursor on: the epoch of each, and its number in the source, int64 [count] both."""

    epochs: NDArray[np.int64]
    numbers: NDArray[np.int64]


def order_at(sample: int, count: int, length: int, *, seed: int | None) -> Order:
    """``count`` samples from cursor ``sample`` on, of ``length`` in each epoch; without a seed in plain order."""
    assert sample >= 0, f"cursor {sample} lies before the start"
    epochs, positions = np.divmod(np.arange(sample, sample + count), length)
    if seed is None:
        return Order(epochs, positions)
    numbers = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        numbers[here] = permute(positions[here], length, seed=seed, epoch=int(epoch))
    return Order(epochs, numbers)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    of_seed = mix64(np.array([seed & _WORD], np.uint64))
    of_epoch = mix64(of_seed ^ np.array([epoch & _WORD], np.uint64))
    return mix64(of_epoch ^ np.arange(ROUNDS, dtype=np.uint64))


def _feistel(words: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    left, right = words >> np.uint64(half_bits), words & np.uint64((1 << half_bits) - 1)
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) >> np.uint64(64 - half_bits))
    return (left << np.uint64(half_bits)) | right
