"""Peak rates of accelerators, as their makers publish them: dense, without structured sparsity.

fp32 is the rate of torch's default, which keeps all 24 bits: no TF32. A maker's figure that counts sparsity is
halved here. MFU is measured against these, so a device that is not listed has none: its rate must be given.
"""

from __future__ import annotations

import re

from superstep.plan.config import Dtype

TERA = 1e12

# The words of torch's device name that tell a model, the most specific first, and FLOP/s by dtype.
DEVICES: tuple[tuple[frozenset[str], dict[Dtype, float]], ...] = (
    # NVIDIA V100 data sheet, 2020: SXM2, PCIe, V100S. Volta's tensor cores know no bf16.
    (frozenset({"V100", "PCIE"}), {"fp32": 14.0 * TERA}),
    (frozenset({"V100"}), {"fp32": 15.7 * TERA}),
    (frozenset({"V100S"}), {"fp32": 16.4 * TERA}),
    # NVIDIA A100 data sheet, 2021: the same for SXM4 and PCIe, 40 and 80 GB.
    (frozenset({"A100"}), {"fp32": 19.5 * TERA, "bf16": 312 * TERA}),
    # NVIDIA H100 data sheet, 2022 (PCIe) and 2024 (SXM, NVL). Torch calls the SXM module "H100 80GB HBM3".
    (frozenset({"H100", "PCIE"}), {"fp32": 51 * TERA, "bf16": 756 * TERA}),
    (frozenset({"H100", "NVL"}), {"fp32": 60 * TERA, "bf16": 835.5 * TERA}),
    (frozenset({"H100"}), {"fp32": 67 * TERA, "bf16": 989.5 * TERA}),
    # NVIDIA H200 data sheet, 2024: Hopper's compute with more memory.
    (frozenset({"H200", "NVL"}), {"fp32": 60 * TERA, "bf16": 835.5 * TERA}),
    (frozenset({"H200"}), {"fp32": 67 * TERA, "bf16": 989.5 * TERA}),
    # NVIDIA Blackwell data sheet, 2024: one GPU of an HGX B200.
    (frozenset({"B200"}), {"fp32": 75 * TERA, "bf16": 2250 * TERA}),
    # AMD Instinct MI300X data sheet, 2023: both by the matrix cores; CDNA 3's take whole fp32.
    (frozenset({"MI300X"}), {"fp32": 163.4 * TERA, "bf16": 1307.4 * TERA}),
)


def peak_flops(name: str, dtype: Dtype) -> float | None:
    """FLOP/s of the device that torch calls ``name``; None where it is not known.

    Whole words are compared: an RTX A1000 is no A100, a GB200 no B200. A slice of a GPU (MIG) has no figure of its
    own.
    """
    words = {word.upper() for word in re.split(r"[^0-9A-Za-z]+", name)}
    if "MIG" in words:
        return None
    return next((rates.get(dtype) for model, rates in DEVICES if model <= words), None)
