"""Optimizers by name: the moments that each keeps of a parameter, by which memory, seconds and checkpoints are counted.

The update of each is in ``numerics.update_rules``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

OptimizerName = Literal["adamw", "lion", "sgd"]
Moment = Literal["exp_avg", "exp_avg_sq"]
MomentFormat = Literal["fp32", "bf16", "8bit"]
MasterFormat = Literal["fp32", "bf16"]

MOMENTS: Mapping[OptimizerName, tuple[Moment, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": (),
}
"""Numbers beside each parameter, which begin at zero."""

MOMENT_BYTES: Mapping[MomentFormat, float] = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / 256}
"""Bytes of a moment's number; in 8 bits with its share of a block's scale."""


def update_passes(optimizer: OptimizerName, moments: MomentFormat = "fp32") -> float:
    """Reads and writes of each parameter's four bytes in an update: its gradient is read, all else read and written."""
    return 3 + 2 * len(MOMENTS[optimizer]) * MOMENT_BYTES[moments] / MOMENT_BYTES["fp32"]


def state_bytes(optimizer: OptimizerName) -> int:
    """Bytes of each parameter in a checkpoint: the weight and its moments, fp32."""
    return 4 * (1 + len(MOMENTS[optimizer]))
