"""Units with a number that is not finite, over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.comm.collectives import sum_over
from superstep.comm.mesh import Group

OVERFLOW = "fp16 overflows at the least loss scale"
"""Why a step is rejected that cannot be skipped."""


class UnitOverflows:
    """Whether a tensor of each unit has a number that is not finite.

    Args:
        units: of the model.
        device: of the rank.
    """

    def __init__(self, units: int, device: torch.device) -> None:
        self._overflows = torch.zeros(units, dtype=torch.int64, device=device)

    def see(self, unit: int, values: Tensor) -> None:
        """Look at a tensor of a unit."""
        self._overflows[unit] |= ~values.isfinite().all()

    def list_units(self, world: Group | None) -> list[int]:
        """The units where any rank has seen one. Every rank calls this together."""
        units: list[int] = torch.nonzero(sum_over(self._overflows, world)).flatten().tolist()
        return units
