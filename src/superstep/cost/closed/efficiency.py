"""Efficiency: the shares of published peaks that real steps reach. All fitted constants, in one table.

None is keyed to a source, a model or a cluster: each belongs to a generation of chips, to a kind of attention kernel or
to a habit of software. Before the fit each had the value ``before``, which papers measured or a round guess gave;
``python -m bench.published --fit`` draws it towards the published runs, more or less freely (``spread``, of its
logarithm). Where no run bears on a constant it stays what it was.

    products, products8, products4   large products' share of the peak, in 16, 8 and 4 bits
    flash-n.forward, .backward       fused attention's share of the 16-bit peak, counting the causal half
    memory, link, network, send      shares of published rates; send: of a transfer between two ranks
    ramp                             the inner dim at which a product reaches half its rate
    hop_s                            seconds of one step of a collective between domains
    power                            a chip with less power for its peak than usual runs at that share to this exponent
    launch_s, eager_launch_s         the least seconds of an operation, in fused and in eager code
    eager                            bytes that unfused operations move, over what their definition says
    host_bytes_per_s                 one rank's optimizer on the host
    hidden                           share of traffic that runs beside compute: shards (ZeRO 3), data (gradients, where
                                     the software overlaps them) or bucket (where it does not), tensor, transfers;
                                     input-gradients: reduced beside the weights' products
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
"""Maker, the first year of a generation, its name; the first that fits."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One number.

    Attributes:
        value: in use.
        before: the fit.
        spread: how far the fit may take it: the standard deviation of its logarithm.
        fitted_on: what bore on it; empty where nothing did.
    """

    value: float
    before: float
    spread: float
    fitted_on: str = ""


CONSTANTS: dict[str, Constant] = {
    "products.pascal": Constant(0.7, 0.7, 0.1),
    "products.volta": Constant(0.715, 0.65, 0.2, "V100: Megatron-LM 2020, dlperf"),
    "products.ampere": Constant(0.726, 0.78, 0.1, "A100: all its tables"),
    "products.hopper": Constant(0.75, 0.7, 0.1, "H100 and H200: all their tables"),
    "products.blackwell": Constant(0.65, 0.7, 0.1, "B200, GB200: Megatron Bridge, stas00, prime-rl"),
    "products.blackwell-ultra": Constant(0.698, 0.7, 0.1, "B300, GB300: Megatron Bridge"),
    "products.tpu": Constant(0.91, 0.85, 0.1, "TPU v5e: MaxText"),
    "products.cdna": Constant(0.48, 0.48, 0.1),
    "products.other": Constant(0.7, 0.7, 0.1),
    "products8.hopper": Constant(0.505, 0.58, 0.1, "H100 and H200: all their tables"),
    "products8.blackwell": Constant(0.5, 0.55, 0.1, "B200, GB200: Megatron Bridge, stas00, prime-rl"),
    "products8.blackwell-ultra": Constant(0.575, 0.55, 0.1, "B300, GB300: Megatron Bridge"),
    "products8.cdna": Constant(0.4, 0.4, 0.1),
    "products8.other": Constant(0.5, 0.5, 0.1),
    "products4.blackwell": Constant(0.341, 0.35, 0.15, "B200, GB200: Megatron Bridge, stas00, prime-rl"),
    "products4.blackwell-ultra": Constant(0.347, 0.35, 0.15, "B300, GB300: Megatron Bridge"),
    "products4.other": Constant(0.35, 0.35, 0.15),
    "flash-1.forward.ampere": Constant(0.269, 0.28, 0.15, "A100: Aleph Alpha"),
    "flash-1.backward.ampere": Constant(0.236, 0.25, 0.15, "A100: Aleph Alpha"),
    "flash-1.forward.hopper": Constant(0.201, 0.25, 0.2, "H100: LLM Foundry"),
    "flash-1.backward.hopper": Constant(0.19, 0.22, 0.2, "H100: LLM Foundry"),
    "flash-2.forward.ampere": Constant(0.53, 0.55, 0.12, "A100: Aleph Alpha, InternEvo"),
    "flash-2.backward.ampere": Constant(0.403, 0.45, 0.12, "A100: Aleph Alpha, InternEvo"),
    "flash-2.forward.hopper": Constant(0.329, 0.36, 0.12, "H100, H200: prime-rl, torchtitan"),
    "flash-2.backward.hopper": Constant(0.281, 0.32, 0.12, "H100, H200: prime-rl, torchtitan"),
    "flash-2.forward.blackwell": Constant(0.162, 0.2, 0.2, "B200: prime-rl"),
    "flash-2.backward.blackwell": Constant(0.132, 0.18, 0.2, "B200: prime-rl"),
    "flash-3.forward.ampere": Constant(0.55, 0.55, 0.12),
    "flash-3.backward.ampere": Constant(0.45, 0.45, 0.12),
    "flash-3.forward.hopper": Constant(0.692, 0.6, 0.12, "H100, H200: NeMo, Megatron Bridge, stas00"),
    "flash-3.backward.hopper": Constant(0.566, 0.5, 0.12, "H100, H200: NeMo, Megatron Bridge, stas00"),
    "flash-3.forward.blackwell": Constant(0.672, 0.62, 0.12, "B200: stas00, Megatron Bridge"),
    "flash-3.backward.blackwell": Constant(0.551, 0.5, 0.12, "B200: stas00, Megatron Bridge"),
    "memory": Constant(0.974, 0.85, 0.08, "all tables"),
    "ramp": Constant(105.0, 96.0, 0.5, "all tables"),
    "link": Constant(0.653, 0.75, 0.08, "tp > 1 within nodes: all tables"),
    "network": Constant(0.866, 0.85, 0.05, "all tables of several nodes"),
    "send": Constant(0.84, 0.5, 0.4, "pp > 1: all tables"),
    "hop_s": Constant(2.12e-05, 1.2e-05, 0.4, "InternEvo over 1,024 chips, dlperf"),
    "power": Constant(0.35, 0.35, 0.2),
    "launch_s": Constant(5.1e-06, 5e-06, 0.2, "all tables"),
    "eager_launch_s": Constant(2.29e-05, 1.2e-05, 0.3, "Aleph Alpha, LLM Foundry, prime-rl"),
    "eager": Constant(1.21, 1.0, 0.25, "Aleph Alpha, prime-rl, stas00"),
    "host_bytes_per_s": Constant(17000000000.0, 16000000000.0, 0.2, "stas00, AdamW on the host"),
    "hidden.shards": Constant(0.67, 0.75, 0.15, "ZeRO 3: LLM Foundry, MaxText, prime-rl"),
    "hidden.data": Constant(0.647, 0.8, 0.2, "NeMo, Megatron Bridge"),
    "hidden.bucket": Constant(0.193, 0.2, 0.4, "Aleph Alpha, Megatron-LM, InternEvo"),
    "hidden.tensor": Constant(1.0, 0.8, 0.15, "NeMo, Megatron Bridge, MaxText"),
    "hidden.input-gradients": Constant(0.146, 0.25, 0.3, "Megatron-LM: Narayanan 2021, Korthikanti 2022"),
    "hidden.transfers": Constant(0.583, 0.5, 0.3, "NeMo, Megatron Bridge"),
}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The constants' values by name."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        """A constant that is there."""
        return self.values[name]

    def of(self, kind: str, *names: str) -> float:
        """The constant ``kind.name`` for the first of the names that has one."""
        return next(self.values[f"{kind}.{name}"] for name in names if f"{kind}.{name}" in self.values)

    def changed(self, changes: Mapping[str, float]) -> Efficiency:
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


def powered(chip: Chip, exponent: float) -> float:
    """The share of its usual rate at which a chip multiplies that has less power for its peak.

    Clocks give way: power grows with more than the cube of the clock, so the clock falls by about its cube root. An
    A100 of 300 W reached 93% of one of 400 W in its best product.
    """
    peak, usual = chip.peak("bf16") or chip.peak("fp16"), WATTS.get(generation(chip))
    if peak is None or usual is None or chip.power_w is None:
        return 1.0
    return float(min(chip.power_w / peak / usual, 1.0) ** exponent)
