"""What a rank does at a moment, as its page in shared memory says it."""

from __future__ import annotations

from enum import IntEnum

TEXT_BYTES = 64
"""Room for an instruction in words."""


class Doing(IntEnum):
    """What a rank does."""

    OTHER = 0
    """Nothing of a program: it reads a batch, say, or writes a checkpoint."""
    WAITS = 1
    """For what an instruction needs of another rank."""
    WORKS = 2
    """On an instruction."""
