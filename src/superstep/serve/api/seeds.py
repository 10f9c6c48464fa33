"""Seeds of answers: one for a request, and one for each answer to it."""

from __future__ import annotations

import hashlib
import random

SEEDS = 1 << 64
"""Seeds are below this; OpenAI's, which may be below zero, have the bits of one above."""


def drawn_seed() -> int:
    """A seed for a request that has none: another one each time."""
    return random.SystemRandom().getrandbits(64)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of one of ``n`` answers: the first has the request's own, so that it is what ``n = 1`` gives."""
    if not choice:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {choice}".encode()).digest()[:8], "little")
