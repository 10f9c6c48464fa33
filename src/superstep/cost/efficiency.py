"""Efficiency: the shares of published peaks that are reached. The only fitted constants, in one table.

None is keyed to a source, a model or a cluster, but to a generation of chips or of kernels. ``bench.published``
fits them, with the values before the fit as a prior, and prints them beside what they were.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.cost.decoder import array
from superstep.cost.rates import Rates
from superstep.errors import ConfigError
from superstep.hardware.chip import Chip, Rate
from superstep.hardware.cluster import Cluster
from superstep.hardware.collectives import Links

GENERATIONS: tuple[tuple[str, int, str], ...] = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of published rates that real steps sustain.

    Attributes:
        products: share of the 16-bit peak that large products reach, by generation of chips.
        eight_bit: the same in 8 bits.
        attention: share of the 16-bit peak of fused attention, forward and backward, by kernel and generation.
        memory: share of the memory's rate.
        ramp: the inner dim at which a product reaches half of its rate.
        link, network: share of the rates of links in and between domains.
        link_latency_s, network_latency_s: of one step of a collective.
        launch_s: from one kernel to the next.
    """

    products: tuple[tuple[str, float], ...]
    eight_bit: tuple[tuple[str, float], ...]
    attention: tuple[tuple[tuple[str, str], tuple[float, float]], ...]
    memory: float
    ramp: float
    link: float
    network: float
    link_latency_s: float
    network_latency_s: float
    launch_s: float


FITTED = Efficiency(
    products=(
        ("pascal", 0.70),
        ("volta", 0.85),
        ("ampere", 0.78),
        ("hopper", 0.65),
        ("blackwell", 0.65),
        ("tpu", 0.90),
        ("cdna", 0.45),
        ("other", 0.70),
    ),
    eight_bit=(("hopper", 0.50), ("blackwell", 0.55), ("cdna", 0.40), ("other", 0.50)),
    attention=(
        (("flash-1", "ampere"), (0.26, 0.22)),
        (("flash-2", "ampere"), (0.53, 0.42)),
        (("flash-2", "hopper"), (0.34, 0.26)),
        (("flash-2", "blackwell"), (0.25, 0.20)),
        (("flash-2", "tpu"), (0.45, 0.40)),
        (("flash-3", "ampere"), (0.55, 0.45)),
        (("flash-3", "hopper"), (0.62, 0.50)),
        (("flash-3", "blackwell"), (0.55, 0.45)),
    ),
    memory=0.80,
    ramp=64.0,
    link=0.65,
    network=0.78,
    link_latency_s=3e-6,
    network_latency_s=12e-6,
    launch_s=6e-6,
)


def generation(chip: Chip) -> str:
    """The name of a chip's generation."""
    return next(name for vendor, year, name in GENERATIONS if vendor in (chip.vendor, "") and chip.year >= year)


def rates_on(cluster: Cluster, *, rate: Rate, attention: str, efficiency: Efficiency = FITTED) -> Rates:
    """What a cluster sustains for linear layers in one format and for an attention kernel of ``stack.ATTENTION``.

    Raises:
        ConfigError: the chip does not multiply in this format.
    """
    chip, era = cluster.chip, generation(cluster.chip)
    half = chip.peak("bf16") or chip.peak("fp16") or chip.peak("fp32")
    peak = chip.peak(rate)
    if peak is None or half is None:
        known = ", ".join(name for name, _ in chip.flops_per_s)
        raise ConfigError(f"{chip.name} does not multiply in {rate}; it knows {known}.")
    products = dict(efficiency.products)
    share = products.get(era, products["other"])
    if rate in ("fp8", "fp4"):
        eight = dict(efficiency.eight_bit)
        share_here = eight.get(era, eight["other"])
    else:
        share_here = share
    kernels = dict(efficiency.attention)
    forward, backward = (
        kernels.get((attention, era)) or kernels.get((attention, "ampere")) or kernels["flash-2", "ampere"]
    )
    return Rates(
        product_flops_per_s=array(peak * share_here),
        half_flops_per_s=array(half * share),
        product_ramp=array(efficiency.ramp),
        cores=array(chip.cores),
        attention_forward=array(forward),
        attention_backward=array(backward),
        peak_half_flops_per_s=array(half),
        memory_bytes_per_s=array(chip.memory_bytes_per_s * efficiency.memory),
        launch_s=array(efficiency.launch_s),
        host_bytes_per_s=array(chip.host_bytes_per_s),
        links=Links(
            link_bytes_per_s=array(cluster.link_bytes_per_s * efficiency.link),
            link_latency_s=array(efficiency.link_latency_s),
            domain=array(cluster.domain),
            network_bytes_per_s=array(cluster.network_bytes_per_s * efficiency.network / cluster.oversubscription),
            network_latency_s=array(efficiency.network_latency_s),
        ),
    )
