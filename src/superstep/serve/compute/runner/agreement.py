"""Agreement between the ranks that share a model: all of them take the same decision."""

from __future__ import annotations

import torch

from superstep.comm.collectives import stack_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import Group

REASON_BYTES = 1024
"""Longest reason in bytes that a rank sends to the others."""


def all_true(mine: bool, group: Group | None, device: Device) -> bool:
    """Whether ``mine`` is true on every rank; the result is equal on all of them."""
    if group is None:
        return mine
    return bool(stack_ranks(torch.tensor([int(mine)], device=device.torch), group).min().item())


def first_reason(mine: str, group: Group | None, device: Device) -> str:
    """The reason of the first rank that has one, on every rank; empty where none has."""
    if group is None:
        return mine
    encoded = torch.zeros(REASON_BYTES, dtype=torch.uint8)
    text = mine.encode()[:REASON_BYTES]
    encoded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    rows = stack_ranks(encoded.to(device.torch), group).cpu()
    reasons = (bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows)
    return next((one for one in reasons if one), "")
