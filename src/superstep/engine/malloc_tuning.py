"""keep_what_is_freed: memory that a step has used is there for the next one.

C's library gives memory back to the system as soon as a step has no use for it, and the next microbatch asks for it
again. The system clears a page before it hands it over: on a virtual machine that takes longer than what is computed in
it, and of a step of the benchmark's it was up to a tenth.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of ``mallopt(3)``: free memory at the heap's end from which it shrinks; and a piece's size from which it is mapped by
itself, and unmapped when it is freed."""

NEVER = -1
LARGEST_BYTES = 32 * 2**20
"""The most that glibc allows for a piece of the heap; larger ones come and go as before."""


def keep_what_is_freed() -> bool:
    """Tell C's library so, for good; whether it knows how. Other libraries than glibc go on as they do."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(TRIM_THRESHOLD, NEVER) and mallopt(MMAP_THRESHOLD, LARGEST_BYTES))
