"""keep_what_is_freed: keep a step's freed memory for the next step.

C's library returns freed memory to the system, and the next microbatch allocates it again. The system clears each page
first: on a virtual machine that takes longer than the computation in it, up to a tenth of a step of the benchmark.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Options of ``mallopt(3)``: free memory at the heap's end from which it shrinks; and the size from which a piece is
mapped by itself, and unmapped when it is freed.
"""

NEVER = -1
RETURNED_BYTES = 2**20
LARGEST_BYTES = 32 * 2**20
"""glibc's limit for a piece of the heap; larger ones are still mapped and unmapped."""


def keep_what_is_freed() -> bool:
    """Set the options, permanently; whether they are supported. Other libraries than glibc ignore them."""
    return _set({TRIM_THRESHOLD: NEVER, MMAP_THRESHOLD: LARGEST_BYTES})


def return_what_is_freed() -> bool:
    """The opposite, for a run that moves activations away; whether it is supported. Each tensor of 1 MiB or more is
    mapped by itself and unmapped when it is freed. In a heap, what comes later rarely fits into the holes: it grew by
    48 of the 68 MiB of each block that had left.
    """
    return _set({MMAP_THRESHOLD: RETURNED_BYTES})


def _set(options: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(option, value) for option, value in options.items())
