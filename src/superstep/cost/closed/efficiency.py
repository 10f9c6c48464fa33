"""Efficiency: the shares of published peaks that real steps reach, and a chip's generation. The fitted numbers are in
``cost.closed.constants``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from superstep.cost.closed.constants import CONSTANTS
from superstep.hardware.chip import Chip

GENERATIONS: tuple[tuple[str, int, str], ...] = (
    ("NVIDIA", 2025, "blackwell-ultra"),
    ("NVIDIA", 2024, "blackwell"),
    ("NVIDIA", 2022, "hopper"),
    ("NVIDIA", 2020, "ampere"),
    ("NVIDIA", 2017, "volta"),
    ("NVIDIA", 0, "pascal"),
    ("Google", 0, "tpu"),
    ("AMD", 0, "cdna"),
    ("", 0, "other"),
)
"""Maker, first year, name of a generation; the first that fits."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def of(self, kind: str, *names: str) -> float:
        """The constant ``kind.name`` for the first of the names that has one."""
        return next(self.values[f"{kind}.{name}"] for name in names if f"{kind}.{name}" in self.values)

    def with_changes(self, changes: Mapping[str, float]) -> Efficiency:
        """The same with some values changed."""
        return replace(self, values={**self.values, **changes})


FITTED = Efficiency({name: constant.value for name, constant in CONSTANTS.items()})


def generation(chip: Chip) -> str:
    """The name of a chip's generation."""
    return next(name for vendor, year, name in GENERATIONS if vendor in (chip.vendor, "") and chip.year >= year)


WATTS: dict[str, float] = {
    "volta": 300 / 125e12,
    "ampere": 400 / 312e12,
    "hopper": 700 / 989.5e12,
    "blackwell": 1000 / 2250e12,
    "blackwell-ultra": 1300 / 2250e12,
}
"""Power for each FLOP/s of the 16-bit peak, of the module that a generation's shares were taken from."""


def power_share(chip: Chip, exponent: float) -> float:
    """The share of its usual rate at which a chip with less power for its peak multiplies.

    Power grows with more than the cube of the clock, so the clock falls by about its cube root. An A100 of 300 W
    reached 93% of one of 400 W in its best product.
    """
    peak, usual = chip.peak("bf16") or chip.peak("fp16"), WATTS.get(generation(chip))
    if peak is None or usual is None or chip.power_w is None:
        return 1.0
    return float(min(chip.power_w / peak / usual, 1.0) ** exponent)
