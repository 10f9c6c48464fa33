"""What MFU is measured against: the published dense rate of the device that torch names.

fp32 is the rate of torch's default, which keeps all 24 bits: no TF32. A device that is not in the catalogue has no
rate: it must be given.
"""

from __future__ import annotations

from superstep.hardware.catalogue import of_device
from superstep.plan.config import Dtype


def peak_flops(name: str, dtype: Dtype) -> float | None:
    """FLOP/s of the device that torch calls ``name``; None where it is not known."""
    chip = of_device(name)
    return None if chip is None else chip.peak(dtype)
