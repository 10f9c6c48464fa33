"""Whether this machine supports exact mode."""

from __future__ import annotations

from functools import cache

import torch

from superstep.comm.device import Device
from superstep.errors import ConfigError
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.exact_self_check import first_difference
from superstep.plan.config import Dtype

difference = cache(first_difference)
"""Cached: a process that opens engines for many layouts checks the machine once."""


def require_exact(compute: Dtype, device: Device) -> None:
    """Check that this machine supports exact mode, and use one thread: more would sum in varying order.

    Raises:
        ConfigError: this machine's order of some sum depends on the batch.
    """
    if device.kind == "cpu":
        torch.set_num_threads(1)
    broken = difference(DTYPES[compute], device.torch)
    if broken is not None:
        raise ConfigError(
            f"numerics.exact = true cannot be kept on this machine ({device.name}): {broken}. "
            "Set numerics.exact = false; prove then compares within a tolerance."
        )
