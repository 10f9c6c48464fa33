"""The peak for MFU: the published dense rate of the device that torch names.

fp32 is the rate of torch's default, with all 24 bits: no TF32. A device outside the catalogue has no rate: the user
must give it.
"""

from __future__ import annotations

from superstep.hardware.catalogue import of_device
from superstep.plan.config import Dtype


def peak_flops(name: str, dtype: Dtype) -> float | None:
    """FLOP/s of the device that torch calls ``name``; None if unknown."""
    chip = of_device(name)
    return None if chip is None else chip.peak(dtype)
