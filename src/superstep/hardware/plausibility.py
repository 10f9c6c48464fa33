"""Limits of a cluster's figures: so wide that they catch a unit wrong by a thousand, not a slow machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from superstep.errors import ConfigError
from superstep.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Limit:
    """From ``low`` to ``high``, both allowed, in a unit, with an example."""

    low: float
    high: float
    unit: str


_FLOPS = "FLOP/s (989 TFLOP/s are 989e12)"
_RATE = "bytes a second (450 GB/s are 450e9, 400 Gb/s are 50e9)"
_BYTES = "bytes (80 GB are 80e9)"
_SECONDS = "seconds (2 microseconds are 2e-6)"

LIMITS: dict[str, Limit] = {
    "year": Limit(2000, 2100, ""),
    "flops_per_s": Limit(1e6, 1e17, _FLOPS),
    "measured_share": Limit(0.01, 1, "of the peak"),
    "memory_bytes": Limit(1e9, 1e13, _BYTES),
    "memory_bytes_per_s": Limit(1e9, 1e14, _RATE),
    "cores": Limit(1, 1e5, ""),
    "launch_s": Limit(0, 1e-2, _SECONDS),
    "link_bytes_per_s": Limit(1e7, 1e13, _RATE),
    "domain": Limit(1, 1e6, "chips"),
    "host_bytes_per_s": Limit(1e8, 1e13, _RATE),
    "power_w": Limit(1, 1e5, "watts"),
    "failures_per_hour": Limit(0, 1, "of one chip"),
    "rows": Limit(1, 1e9, ""),
    "width": Limit(1, 1e9, ""),
    "inner": Limit(1, 1e9, ""),
    "bytes": Limit(1, 1e13, _BYTES),
    "bytes_per_s": Limit(1e4, 1e15, _RATE),
    "chips": Limit(1, 1e7, ""),
    "link_latency_s": Limit(0, 0.1, _SECONDS),
    "network_bytes_per_s": Limit(1e6, 1e13, _RATE),
    "network_latency_s": Limit(0, 0.1, _SECONDS),
    "oversubscription": Limit(1, 1000, ""),
    "price_per_chip_hour": Limit(0, 1e4, ""),
    "ranks": Limit(1, 1e7, ""),
    "latency_s": Limit(0, 10, _SECONDS),
    "disk_read_bytes_per_s": Limit(1e6, 1e13, _RATE),
    "disk_write_bytes_per_s": Limit(1e6, 1e13, _RATE),
    "tp": Limit(1, 1e5, "ranks"),
    "block_keys": Limit(1, 1e6, ""),
    "is_paged": Limit(0, 1, ""),
    "leaves_rows": Limit(0, 1, ""),
    "term_s": Limit(0, 10, _SECONDS),
    "held_bytes": Limit(0.1, 100, "for a weight"),
    "beside_bytes": Limit(0, 1e11, _BYTES),
    "spread": Limit(0, 100, "as a share of 1"),
}
"""By field, of any dataclass."""

PRODUCTS_TO_MEMORY = Limit(1, 1e4, "")
"""FLOPs in the time of a byte of memory; 26 to 1,875 on the chips of the catalogue."""
MEMORY_TO_LINK = Limit(1, 2000, "")
"""Bytes of memory in the time of a byte on the fast links; 2 to 71 in the catalogue, 125 for a B200 on PCIe."""
MEMORY_TO_NETWORK = Limit(1, 30_000, "")
"""Bytes of memory in the time of a byte between domains; 48 to 442 in the catalogue, 27,000 for an H100 on 1 Gb/s."""


def check_cluster(cluster: Cluster) -> Cluster:
    """The same cluster; raises ConfigError where a figure is absurd, or two of them together are."""
    for name, key, value in _figures(cluster, ""):
        limit = LIMITS[key]
        # No comparison with NaN is true.
        if not limit.low <= value <= limit.high:
            unit = f" {limit.unit}" if limit.unit else ""
            raise ConfigError(f"{name} = {value:.6g} must be from {limit.low:g} to {limit.high:g}{unit}.")
    _check_ratios(cluster)
    _check_domain(cluster)
    return cluster


def _figures(value: object, prefix: str) -> Iterator[tuple[str, str, float]]:
    """Each number with its name in a file and the key of its limit."""
    assert is_dataclass(value)
    for field in fields(value):
        name = f"{prefix}{field.name}"
        match getattr(value, field.name):
            case tuple(items):
                for k, item in enumerate(items):
                    if is_dataclass(item):
                        yield from _figures(item, f"{name}[{k}].")
                    else:
                        key, figure = item
                        yield f"{name}.{key}", field.name, figure
            case int() | float() as figure:
                yield name, field.name, figure
            case part if is_dataclass(part):
                yield from _figures(part, f"{name}.")


def _check_ratios(cluster: Cluster) -> None:
    chip = cluster.chip
    if not chip.flops_per_s:
        raise ConfigError("chip.flops_per_s is empty; give the rate of at least one format, {bf16 = 989e12} say.")
    products = "chip.flops_per_s", max(rate for _, rate in chip.flops_per_s)
    memory = "chip.memory_bytes_per_s", chip.memory_bytes_per_s
    ratios = (
        (products, memory, PRODUCTS_TO_MEMORY),
        (memory, ("chip.link_bytes_per_s", chip.link_bytes_per_s), MEMORY_TO_LINK),
        (memory, ("link_bytes_per_s", cluster.link_bytes_per_s), MEMORY_TO_LINK),
        (memory, ("network_bytes_per_s", cluster.network_bytes_per_s), MEMORY_TO_NETWORK),
    )
    for (fast_name, fast), (slow_name, slow), limit in ratios:
        if not limit.low <= fast / slow <= limit.high:
            raise ConfigError(
                f"{slow_name} = {slow:g} is {fast / slow:.3g} times below {fast_name} = {fast:g}; "
                f"from {limit.low:g} to {limit.high:g} times are possible: one of the two is in another unit."
            )


def _check_domain(cluster: Cluster) -> None:
    chips, domain = cluster.chips, cluster.domain
    if chips > domain and chips % domain:
        below = chips // domain * domain
        raise ConfigError(
            f"chips = {chips} is more than one domain of {domain} chips and no multiple of it; "
            f"{below} or {below + domain} would do, or a domain that divides {chips}."
        )
