"""A core of a server's CPU as a chip, to compare layouts where the machine was not measured."""

from __future__ import annotations

from superstep.hardware.chip import Chip
from superstep.hardware.cluster import Cluster

CORE = Chip(
    name="CPU core",
    vendor="any",
    year=2023,
    flops_per_s=(("fp32", 100e9), ("bf16", 100e9)),
    memory_bytes=4 * 2.0**30,
    memory_bytes_per_s=10e9,
    cores=1,
    launch_s=5e-6,
    link_bytes_per_s=2e9,
    domain=64,
    source="orders of magnitude, of superstep measure on an Emerald Rapids; a network of 10 Gb/s",
)
"""Its ratios are those of any server core of these years; its seconds are not real."""


def cores(count: int, on_each_host: int) -> Cluster:
    """A cluster of ``count`` cores."""
    return Cluster(
        chip=CORE,
        chips=count,
        domain=on_each_host,
        link_bytes_per_s=CORE.link_bytes_per_s,
        link_latency_s=20e-6,
        network_bytes_per_s=1.25e9,
        network_latency_s=50e-6,
    )
