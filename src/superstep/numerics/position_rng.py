"""Random numbers that belong to a place of the training, not to a rank."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def standard_normal(key: str, rows: int, width: int) -> Tensor:
    """[rows, width] draws of normal(0, 1), fp32 on the CPU: a function of ``key`` alone.

    The same key gives the same bits on any rank and device; so a key names the noise's use (seed, step, layer,
    sequence), and not the layout.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.empty(rows, width, dtype=torch.float32, device="cpu").normal_(generator=generator)
