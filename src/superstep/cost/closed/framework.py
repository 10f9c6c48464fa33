"""Software: the properties of a training stack, in the terms of its documentation. ``price_of`` turns a cluster and a
software into the numbers for the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from superstep.cost.closed.efficiency import FITTED, Efficiency, generation, power_share
from superstep.cost.closed.framework_arrays import ATTENTION, Stack
from superstep.cost.closed.framework_memory import MEGATRON, FrameworkMemory
from superstep.cost.closed.model_numbers import array
from superstep.cost.closed.rates import ChipRates
from superstep.errors import ConfigError
from superstep.hardware.chip import Rate
from superstep.hardware.cluster import Cluster
from superstep.hardware.collectives import WIRINGS, Links

T = TypeVar("T")
Attention = Literal["eager", "fused-softmax", "flash-1", "flash-2", "flash-3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A training stack.

    Attributes:
        compute: the format of the products of linear layers.
        attention: the kernel. eager and fused-softmax store the scores; flash-3 stands for the kernels that are written
            for one
        chip: FlashAttention 3 and 4, cuDNN.
        has_fused_norms: each norm is one kernel.
        has_fused_kernels: the operations after a product are one kernel: bias, activation, dropout, sum.
        has_fused_loss: the logits are never whole in memory.
        gradient_bytes: bytes of a gradient when it is reduced.
        kept_gradient_bytes: bytes of a gradient when it is accumulated.
        bucket_bytes: the largest piece that is sent over the data-parallel ranks at once.
        bucket_bytes_per_rank: if this times the number of these ranks is larger, it is the size of the piece.
        overlaps_data: traffic of gradients and parameters overlaps compute.
        overlaps_tensor: tensor-parallel traffic and transfers between stages overlap compute.
        overlaps_experts: the exchange of experts' tokens overlaps another microbatch's compute (DualPipe).
        balances_context: context-parallel ranks have early and late tokens, so that causal attention is even.
        sends_once: a token is sent to a domain once, even if several of its experts are there.
        holds: its use of memory.
    """

    compute: Rate = "bf16"
    attention: Attention = "flash-2"
    has_fused_norms: bool = True
    has_fused_kernels: bool = True
    has_fused_loss: bool = False
    gradient_bytes: float = 4.0
    kept_gradient_bytes: float = 4.0
    bucket_bytes: float = 80e6
    bucket_bytes_per_rank: float = 2e6
    overlaps_data: bool = True
    overlaps_tensor: bool = False
    overlaps_experts: bool = False
    balances_context: bool = True
    sends_once: bool = False
    holds: FrameworkMemory = MEGATRON


SUPERSTEP = Software(has_fused_norms=False, has_fused_kernels=False, has_fused_loss=True, bucket_bytes=1e12)
"""Superstep itself: eager kernels, a loss in chunks, one collective for each unit, gradients reduced in fp32."""


def price_of(cluster: Cluster, software: Software, efficiency: Efficiency = FITTED) -> tuple[ChipRates, Stack]:
    """The rates that a cluster reaches with a software, and the software's properties. Raises ConfigError if the chip
    has no products in the format.
    """
    return _rates(cluster, software, efficiency), _stack(software, efficiency)


def stack_fields(values: Sequence[T]) -> T:
    """Join values of one class into one value: their arrays are stacked along a new dim, field by field."""
    first: Any = values[0]
    if isinstance(first, np.ndarray):
        return np.stack([np.asarray(value) for value in values])  # type: ignore[return-value]
    parts = {field.name: stack_fields([getattr(value, field.name) for value in values]) for field in fields(first)}
    together: T = type(first)(**parts)
    return together


def take(value: T, places: npt.NDArray[np.int_]) -> T:
    """The values at some indices of what ``stack_fields`` joined; an index may occur several times."""
    parts: dict[str, Any] = {}
    for part in fields(value):  # type: ignore[arg-type]
        each = getattr(value, part.name)
        parts[part.name] = each[places] if isinstance(each, np.ndarray) else take(each, places)
    return type(value)(**parts)


def _rates(cluster: Cluster, software: Software, efficiency: Efficiency) -> ChipRates:
    chip, era = cluster.chip, generation(cluster.chip)
    half = chip.peak("bf16") or chip.peak("fp16") or chip.peak("fp32")
    # Chips without bf16 ran fp16.
    peak = half if software.compute == "bf16" else chip.peak(software.compute)
    if peak is None or half is None:
        known = ", ".join(name for name, _ in chip.flops_per_s)
        raise ConfigError(f"{chip.name} does not multiply in {software.compute}; it knows {known}.")
    cool = power_share(chip, efficiency["power"])
    kind = {"fp8": "products8", "fp4": "products4"}.get(software.compute, "products")
    kernel = software.attention if software.attention.startswith("flash") else "flash-2"
    kin = ("blackwell",) if era.startswith("blackwell") else ()
    return ChipRates(
        product_flops_per_s=array(peak * efficiency.of(kind, era, "other") * cool),
        half_flops_per_s=array(half * efficiency.of("products", era, "other") * cool),
        product_ramp=array(efficiency["ramp"]),
        cores=array(chip.cores),
        attention_forward=array(efficiency.of(f"{kernel}.forward", era, *kin, "ampere")),
        attention_backward=array(efficiency.of(f"{kernel}.backward", era, *kin, "ampere")),
        peak_half_flops_per_s=array(half * cool),
        memory_bytes_per_s=array(chip.memory_bytes_per_s * efficiency["memory"]),
        launch_s=array(efficiency["launch_s"]),
        host_bytes_per_s=array(efficiency["host_bytes_per_s"]),
        grouped_share=array(efficiency["grouped"]),
        exchange_share=array(efficiency["exchange"]),
        links=Links(
            link_bytes_per_s=array(cluster.link_bytes_per_s * efficiency["link"]),
            link_latency_s=array(efficiency["hop_s"] / 4),
            domain=array(cluster.domain),
            network_bytes_per_s=array(cluster.network_bytes_per_s * efficiency["network"] / cluster.oversubscription),
            network_latency_s=array(efficiency["hop_s"]),
            send_share=array(efficiency["send"]),
            wiring=array(WIRINGS.index(cluster.topology) if cluster.topology in WIRINGS else 0),
        ),
    )


def _stack(software: Software, efficiency: Efficiency) -> Stack:
    tensor = "hidden.tensor" if software.overlaps_tensor else "hidden.input-gradients"
    return Stack(
        attention=array(ATTENTION.index(software.attention)),
        has_fused_norms=array(software.has_fused_norms),
        has_fused_elementwise=array(software.has_fused_kernels),
        has_fused_loss=array(software.has_fused_loss),
        is_eight_bit=array(software.compute in ("fp8", "fp4")),
        gradient_bytes=array(software.gradient_bytes),
        kept_gradient_bytes=array(software.kept_gradient_bytes),
        bucket_bytes=array(software.bucket_bytes),
        overlap_shards=array(efficiency["hidden.shards"]),
        overlap_data=array(efficiency["hidden.data" if software.overlaps_data else "hidden.bucket"]),
        # Eager code waits for each collective; fused layers reduce the input's gradient during the weight's product.
        overlap_tensor=array(efficiency[tensor] if software.has_fused_kernels or software.overlaps_tensor else 0.0),
        overlap_pipeline=array(efficiency["hidden.transfers"] if software.overlaps_tensor else 0.0),
        overlap_experts=array(efficiency["hidden.experts"] if software.overlaps_experts else 0.0),
        eager=array(efficiency["eager"]),
        balances_context=array(software.balances_context),
        sends_once=array(software.sends_once),
    )
