"""Random numbers of a sample, by its place: the same on every rank, after a restart, and in any order of reading.

Philox is counter-based (Salmon 2011): its numbers are a function of a key and a counter. The key is the seed and the
split; the counter's upper words are the epoch and the sample, so that no two samples share a number.
"""

from __future__ import annotations

import numpy as np

from superstep.data.batch import SPLITS, SplitName


def noise_of(seed: int, split: SplitName, epoch: int, index: int) -> np.random.Generator:
    """The generator of a sample's random numbers in an epoch."""
    key = np.array([seed, SPLITS.index(split)], np.uint64)
    counter = np.array([0, 0, epoch, index], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
