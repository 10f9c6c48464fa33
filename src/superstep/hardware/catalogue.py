"""The catalogue of chips: one table of published figures, and the names that people and torch use."""

from __future__ import annotations

import difflib
import re

from superstep.errors import ConfigError, did_you_mean
from superstep.hardware.chip import Chip
from superstep.hardware.nvidia import NVIDIA
from superstep.hardware.other_vendors import OTHERS

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (*NVIDIA, *OTHERS)}

ALIASES: dict[str, tuple[str, ...]] = {
    "P100-SXM": ("P100", "P100-SXM2", "P100-SXM2-16GB"),
    "P100-PCIe": ("P100-PCIe-16GB",),
    "V100-16GB-SXM": ("V100", "V100-SXM", "V100-SXM2", "V100-16GB", "V100-SXM2-16GB"),
    "V100-32GB-SXM": ("V100-32GB", "V100-SXM2-32GB"),
    "V100-32GB-SXM3": ("V100-SXM3", "V100-SXM3-32GB"),
    "V100-16GB-PCIe": ("V100-PCIe", "V100-PCIe-16GB"),
    "V100-32GB-PCIe": ("V100-PCIe-32GB",),
    "V100S-PCIe": ("V100S", "V100S-PCIe-32GB"),
    "A100-40GB-SXM": ("A100-40GB", "A100-SXM4-40GB", "A100-SXM-40GB"),
    "A100-80GB-SXM": ("A100", "A100-80GB", "A100-SXM", "A100-SXM4", "A100-SXM4-80GB", "A100-SXM-80GB"),
    "A100-40GB-PCIe": ("A100-PCIe-40GB",),
    "A100-80GB-PCIe": ("A100-PCIe", "A100-PCIe-80GB"),
    "A800-80GB-SXM": ("A800", "A800-SXM", "A800-SXM4-80GB", "A800-80GB"),
    "L40S": ("L40S-48GB",),
    "H100-SXM": ("H100", "H100-80GB", "H100-SXM5", "H100-SXM5-80GB", "H100-SXM-80GB", "H100-80GB-SXM"),
    "H100-96GB-SXM-500W": ("H100-96GB", "H100 SXM 500W 96GB HBM2e", "H100-SXM-96GB-HBM2e", "H100-SXM-96GB"),
    "H100-PCIe": ("H100-PCIe-80GB", "H100-80GB-PCIe"),
    "H100-NVL": ("H100-NVL-94GB",),
    "H800-SXM": ("H800", "H800-SXM5-80GB", "H800-80GB-SXM"),
    "H200-SXM": ("H200", "H200-141GB", "H200-SXM-141GB", "H200-141GB-SXM"),
    "H200-NVL": ("H200-NVL-141GB",),
    "GH200": ("GH200-141GB",),
    "B200": ("B200-SXM", "B200-180GB", "B200-SXM-180GB"),
    "GB200": ("GB200-NVL72",),
    "B300": ("B300-SXM", "B300-288GB", "B300-SXM-288GB"),
    "GB300": ("GB300-NVL72",),
    "MI250X": ("MI250X-128GB",),
    "MI300X": ("MI300X-192GB",),
    "MI325X": ("MI325X-256GB",),
    "MI355X": ("MI355X-288GB",),
    "TPUv3": ("v3",),
    "TPUv4": ("v4", "v4p"),
    "TPUv5e": ("v5e", "v5litepod"),
    "TPUv5p": ("v5p",),
    "TPUv6e": ("v6e", "Trillium"),
    "TPUv7x": ("v7x", "TPU7x", "Ironwood"),
    "Gaudi3": ("Gaudi3-128GB",),
    "Trainium2": ("Trn2",),
}
"""Other names; case, spaces and punctuation do not count."""


def key_of(name: str) -> str:
    """A name as it is compared."""
    return re.sub(r"[^0-9a-z]", "", name.lower())


_BY_KEY = {key_of(name): chip for chip, names in ALIASES.items() for name in (chip, *names)}


def chip(name: str, *, field: str = "chip") -> Chip:
    """The chip with this name; raises ConfigError, which names the field, for an unknown one."""
    known = _BY_KEY.get(key_of(name))
    if known is None:
        spelled = {other.lower(): other for chip, names in ALIASES.items() for other in (chip, *names)}
        close = difflib.get_close_matches(name.lower(), spelled, n=1)
        hint = did_you_mean(spelled[close[0]], [spelled[close[0]]]) if close else did_you_mean("", CHIPS)
        raise ConfigError(f"{field} = {name!r} is not in the catalogue{hint}")
    return CHIPS[known]


# The words of torch's device name that tell a chip, the most specific first.
DEVICES: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(words.split()), name)
    for words, name in (
        ("P100 SXM2", "P100-SXM"),
        ("P100 PCIE", "P100-PCIe"),
        ("V100 PCIE 32GB", "V100-32GB-PCIe"),
        ("V100 PCIE", "V100-16GB-PCIe"),
        ("V100 SXM3", "V100-32GB-SXM3"),
        ("V100 32GB", "V100-32GB-SXM"),
        ("V100", "V100-16GB-SXM"),
        ("V100S", "V100S-PCIe"),
        ("A100 PCIE 40GB", "A100-40GB-PCIe"),
        ("A100 PCIE", "A100-80GB-PCIe"),
        ("A100 40GB", "A100-40GB-SXM"),
        ("A100", "A100-80GB-SXM"),
        ("A800 SXM4", "A800-80GB-SXM"),
        ("L40S", "L40S"),
        ("H100 PCIE", "H100-PCIe"),
        ("H100 NVL", "H100-NVL"),
        ("H100 96GB", "H100-96GB-SXM-500W"),
        # Torch calls the SXM module "H100 80GB HBM3".
        ("H100", "H100-SXM"),
        ("H800", "H800-SXM"),
        ("H200 NVL", "H200-NVL"),
        ("H200", "H200-SXM"),
        ("GH200", "GH200"),
        ("GB200", "GB200"),
        ("B200", "B200"),
        ("GB300", "GB300"),
        ("B300", "B300"),
        ("MI300X", "MI300X"),
        ("MI325X", "MI325X"),
        ("MI355X", "MI355X"),
    )
)


def of_device(name: str) -> Chip | None:
    """The chip of a device that torch calls ``name``; None where the catalogue does not have it.

    Whole words are compared: an RTX A1000 is no A100, a GB200 no B200. A slice of a GPU (MIG) has no figures of its
    own, nor has one die of an MI250X.
    """
    words = {word.upper() for word in re.split(r"[^0-9A-Za-z]+", name)}
    if "MIG" in words:
        return None
    return next((CHIPS[chip] for needed, chip in DEVICES if needed <= words), None)
