"""Prices: seconds of an operation.

A ``MachineRates`` has one rate for each kind, like a data sheet. ``MeasuredMachine`` looks up measurements: products by
shape, passes over memory by size, collectives by their latency and rate.

    collectives of b bytes over n ranks, by a ring or by direct exchange (Thakur 2005, sec. 4)
      gather, reduce-scatter, all-to-all    b · (n - 1) / n / link_bytes_per_s + link_latency_s
      all-reduce                            twice that
      send                                  b / link_bytes_per_s + link_latency_s
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from superstep.cost.program.time.operation import (
    AttentionOperation,
    Axis,
    CollectiveOperation,
    MatmulOperation,
    MemoryOperation,
    Operations,
)
from superstep.errors import ConfigError
from superstep.hardware.chip import ProductRate, Rate
from superstep.hardware.cluster import Cluster, Collective
from superstep.plan.config import Place

DISK_BYTES_PER_S = 6e8
"""Of a disk that was not measured: an SSD behind SATA."""

LIKE: Mapping[str, str] = {"norm": "copy", "gate": "exp", "loss": "exp"}
"""Kinds of passes of our own kernels, and torch's kinds with about the same rate, where ours were not measured."""


class Prices(Protocol):
    """Seconds of one operation on one rank; and rates that describe a machine in a line."""

    @property
    def gemm_flops_per_s(self) -> float:
        """Of the best product."""

    @property
    def memory_bytes_per_s(self) -> float:
        """Of large copies."""

    @property
    def link_bytes_per_s(self) -> float:
        """Between two ranks."""

    @property
    def shared_cores(self) -> int | None:
        """The cores that all ranks of a host share, for computing and sending; None where each rank has a device."""

    def product_s(self, product: MatmulOperation) -> float:
        """One product, or a batch of them."""

    def attention_s(self, attention: AttentionOperation) -> float:
        """One call."""

    def pass_s(self, kernel: str, size: float) -> float:
        """One pass over ``size`` bytes, reads and writes together."""

    def collective_s(self, collective: Collective, size: float, ranks: int) -> float:
        """One collective of ``size`` bytes, counted as in ``hardware.cluster.CollectiveRate``; 0 with one rank."""

    def move_s(self, place: Place, size: float, *, is_out: bool) -> float:
        """One copy of ``size`` bytes from a rank's device to a place, or back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Rates of one rank's device, and of the link between two of them."""

    gemm_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    host_bytes_per_s: float = 25e9
    disk_bytes_per_s: float = DISK_BYTES_PER_S

    @property
    def shared_cores(self) -> None:
        """None: each rank has its own device."""
        return

    def product_s(self, product: MatmulOperation) -> float:
        return product.flops / product.count / self.gemm_flops_per_s

    def attention_s(self, attention: AttentionOperation) -> float:
        return attention.flops / attention.count / self.gemm_flops_per_s

    def pass_s(self, kernel: str, size: float) -> float:
        return size / self.memory_bytes_per_s

    def collective_s(self, collective: Collective, size: float, ranks: int) -> float:
        """By a ring or by direct exchange."""
        if ranks == 1:
            return 0.0
        if collective == "send":
            return size / self.link_bytes_per_s + self.link_latency_s
        once = size * (ranks - 1) / ranks / self.link_bytes_per_s + self.link_latency_s
        return 2 * once if collective == "all-reduce" else once

    def move_s(self, place: Place, size: float, *, is_out: bool) -> float:
        return size / (self.disk_bytes_per_s if place == "disk" else self.host_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """A machine with measurements in its cluster file.

    Attributes:
        cluster: with tables of products, copies and collectives.
        rate: the format of products.
        is_host: the ranks compute on the host's cores.
    """

    cluster: Cluster
    rate: Rate
    is_host: bool

    def __post_init__(self) -> None:
        """Check the tables; raises ConfigError where nothing was measured in this format."""
        if not self._products("product"):
            raise ConfigError(
                f"{self.cluster.chip.name}: no product was measured in {self.rate}; superstep measure writes a file "
                "that has them."
            )

    @property
    def shared_cores(self) -> int | None:
        return self.cluster.chip.cores if self.is_host else None

    @property
    def gemm_flops_per_s(self) -> float:
        return max(p.flops_per_s for p in self._products("product"))

    @property
    def memory_bytes_per_s(self) -> float:
        """Of the largest measured copy."""
        return self.cluster.chip.memory_bytes_per_s

    @property
    def link_bytes_per_s(self) -> float:
        return self.cluster.link_bytes_per_s

    def product_s(self, product: MatmulOperation) -> float:
        """By the rates of nearby shapes."""
        if product.kernel == "batch" and not self._products("batch"):
            return self.pass_s("read", 4 * product.numel)
        shape = (product.rows, product.width, product.inner)
        return self._overhead_s() + product.flops / product.count / self._rate(product.kernel, shape)

    def attention_s(self, attention: AttentionOperation) -> float:
        """By the rates of nearby lengths, which were measured causal: without the mask there is twice as much work."""
        kernel = "attention-backward" if attention.is_backward else "attention"
        shape = (attention.queries, attention.keys, attention.head_dim)
        whole = 1 if attention.is_causal else 2
        return self._overhead_s() + whole * attention.flops / attention.count / self._rate(kernel, shape)

    def pass_s(self, kernel: str, size: float) -> float:
        """By nearby sizes; no pass is faster than the smallest measured one, and a view costs its launch."""
        if kernel == "view":
            return self.cluster.chip.launch_s
        known = self._passes(kernel)
        like = LIKE.get(kernel, "copy")
        return self._overhead_s() + _between(known or self._passes(like) or self._passes("copy"), size)

    def _passes(self, kernel: str) -> list[tuple[int, float]]:
        return [(c.bytes, c.bytes / c.bytes_per_s) for c in self.cluster.chip.copies if c.kernel == kernel]

    def _overhead_s(self) -> float:
        """A launch's extra time in a model's code, compared with the measuring loop."""
        return max(0.0, self.cluster.chip.launch_s - min((s for _, s in self._passes("copy")), default=0.0))

    def collective_s(self, collective: Collective, size: float, ranks: int) -> float:
        """Latency and rate measured with this number of ranks, or else the nearest."""
        if ranks == 1:
            return 0.0
        known = [c for c in self.cluster.collectives if c.name == collective]
        if not known:
            link = self.cluster
            return size / link.link_bytes_per_s + link.link_latency_s
        nearest = min(known, key=lambda c: abs(math.log(c.ranks / ranks)))
        return nearest.latency_s + size / nearest.bytes_per_s

    def move_s(self, place: Place, size: float, *, is_out: bool) -> float:
        """At the published rate to the host's memory; at a share of the disk's measured one for each rank of a host."""
        cluster = self.cluster
        if place != "disk":
            return size / cluster.chip.host_bytes_per_s
        rate = cluster.disk_write_bytes_per_s if is_out else cluster.disk_read_bytes_per_s
        return size * (cluster.chips if self.is_host else 1) / (rate or DISK_BYTES_PER_S)

    def _products(self, kernel: str) -> list[ProductRate]:
        return [p for p in self.cluster.chip.products if p.kernel == kernel and p.rate == self.rate]

    def _rate(self, kernel: str, shape: Sequence[int]) -> float:
        known = [((p.rows, p.width, p.inner), p.flops_per_s) for p in self._products(kernel)]
        if not known:
            return self._rate("product", shape)
        return nearby(known, shape)


def nearby(known: Iterable[tuple[Sequence[int], float]], shape: Sequence[int]) -> float:
    """The value at a shape from known ones: the mean of their logarithms, weighted by one over the fourth power of the
    distance in octaves (Shepard 1968); a known shape has its own value.
    """
    total = weights = 0.0
    for other, value in known:
        square = sum(math.log2(a / b) ** 2 for a, b in zip(shape, other, strict=True))
        if square == 0.0:
            return value
        weight = square**-2
        total += weight * math.log(value)
        weights += weight
    return math.exp(total / weights)


def _between(known: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds at a size: interpolated linearly between nearby sizes, at the last rate beyond."""
    ordered = sorted(known)
    smallest, largest = ordered[0], ordered[-1]
    if size <= smallest[0]:
        return smallest[1]
    if size >= largest[0]:
        return largest[1] * size / largest[0]
    above = next(place for place, (at, _) in enumerate(ordered) if at >= size)
    (low, low_s), (high, high_s) = ordered[above - 1], ordered[above]
    return low_s + (high_s - low_s) * (size - low) / (high - low)


def seconds(operations: Operations, machine: Prices, ranks: Callable[[Axis], int]) -> float:
    """Operations in sequence on one rank; ``ranks``: the number of ranks of an axis."""
    total = 0.0
    for operation in operations:
        match operation:
            case MatmulOperation():
                once = machine.product_s(operation)
            case AttentionOperation():
                once = machine.attention_s(operation)
            case MemoryOperation():
                once = machine.pass_s(operation.kernel, operation.bytes)
            case CollectiveOperation():
                once = machine.collective_s(operation.collective, operation.bytes, ranks(operation.axis))
        total += operation.count * once
    return total
