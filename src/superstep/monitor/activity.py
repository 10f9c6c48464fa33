"""What a rank does at a moment, as its status page records it."""

from __future__ import annotations

from enum import IntEnum

TEXT_BYTES = 64
"""The longest text of an instruction."""


class Activity(IntEnum):
    OTHER = 0
    """Nothing of a program: it reads a batch or writes a checkpoint, for example."""
    WAITS = 1
    """It waits for another rank's data."""
    WORKS = 2
    """It runs an instruction."""
