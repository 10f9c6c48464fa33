"""Makers' units in base units; and arrays of numbers for many plans, chips or runs."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from superstep.hardware.chip import Rate

Array: TypeAlias = npt.NDArray[np.float64]
"""One number for each of many plans, chips, groups or runs."""

GIB = 2.0**30
"""Bytes. Sizes of a chip's memory are of these, whatever the data sheet writes: an "80 GB" A100 holds 80 GiB."""
GB_PER_S = 1e9
"""Bytes a second. Rates of memory and links are decimal."""
GBIT_PER_S = 1e9 / 8


def tera(**rates: float) -> tuple[tuple[Rate, float], ...]:
    """FLOP/s by format, from TFLOP/s."""
    formats: tuple[Rate, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
    assert rates.keys() <= set(formats)
    return tuple((rate, rates[rate] * 1e12) for rate in formats if rate in rates)
