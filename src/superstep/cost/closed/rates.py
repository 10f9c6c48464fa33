"""ChipRates: sustained rates of hardware and software together, of one machine or of many at once.

A published peak is never reached; the share depends on the chip's generation, and on the software's kernels:
``cost.closed.efficiency`` has those shares, with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.hardware.collectives import Links
from superstep.hardware.units import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipRates:
    """Sustained rates of one chip and its links; arrays of one shape are as many machines.

    Attributes:
        product_flops_per_s: large products in the format of the weights' products.
        half_flops_per_s: large products in 16 bits: attention's, the head's, the router's.
        product_ramp: the inner dim at which a product reaches half of that rate.
        cores: that run the tiles of a product.
        attention_forward, attention_backward: fused attention's share of the 16-bit peak.
        peak_half_flops_per_s: that peak.
        memory_bytes_per_s: streaming.
        launch_s: between two kernels, on the device.
        host_bytes_per_s: to the host's memory.
        grouped_share: share of a large product's rate for products of many experts at once.
        exchange_share: share of the links' rates for an exchange of experts' tokens.
        links: between the chips.
    """

    product_flops_per_s: Array
    half_flops_per_s: Array
    product_ramp: Array
    cores: Array
    attention_forward: Array
    attention_backward: Array
    peak_half_flops_per_s: Array
    memory_bytes_per_s: Array
    launch_s: Array
    host_bytes_per_s: Array
    grouped_share: Array
    exchange_share: Array
    links: Links
