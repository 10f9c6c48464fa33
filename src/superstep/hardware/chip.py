"""Chip: one accelerator, with its maker's published figures and those measured on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from superstep.hardware.serving_rate import ServingRate

Rate = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
"""The formats with their own rates. fp32 keeps all 24 bits; tf32 rounds factors to 11."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """The measured rate of one matrix product, or of attention.

    Attributes:
        kernel: "product", "gradient" (a weight's, added to a sum), "batch" (of many narrow ones, each of these sizes),
        "attention" or "attention-backward"; attention counts the full square of queries and keys, backward twice that,
        even if it is causal.
        rows, width, inner: of [rows, inner] x [inner, width]; of attention queries, keys and the width of a head.
    """

    kernel: str = "product"
    rate: Rate
    rows: int
    width: int
    inner: int
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRate:
    """The measured rate of memory, for an operation that reads and writes ``bytes`` together.

    Attributes:
        kernel: "copy", or a kind with a rate of its own, named as in ``cost.program.time.operation``.
    """

    kernel: str = "copy"
    bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator: dense rates, without structured sparsity.

    Attributes:
        name: the name of the chip, as its data sheet writes it.
        vendor: the maker of the chip.
        year: the year of its generation; the choice of kernels depends on it.
        flops_per_s: peak rate of matrix products by number format; the chip does not multiply other formats.
        measured_share: the best published rate of a product in 16 bits, as a share of the peak; None if unpublished.
        memory_bytes: the size of its own memory.
        memory_bytes_per_s: the rate of its own memory.
        cores: streaming multiprocessors or their equivalent; a product's tiles run on them in waves.
        launch_s: seconds from the end of a kernel to the start of the next.
        link_bytes_per_s: the rate of all its links to the fast domain together, one direction.
        domain: the number of chips that the fast links connect.
        host_bytes_per_s: the rate to the memory of the host, one direction.
        power_w: thermal design power; None if unpublished.
        failures_per_hour: failures that end a job, for one chip with its share of the host; None if unpublished.
        source: where the figures were read.
        products: measured rates of matrix products on this chip, by shape; empty if only published figures are known.
        copies: measured rates of its memory, by size.
        serving: measured rates of a server's engine steps, by number format and kernels.
    """

    name: str
    vendor: str
    year: int
    flops_per_s: tuple[tuple[Rate, float], ...]
    measured_share: float | None = None
    memory_bytes: float
    memory_bytes_per_s: float
    cores: int
    launch_s: float = 3e-6
    link_bytes_per_s: float
    domain: int
    host_bytes_per_s: float = 25e9
    power_w: float | None = None
    failures_per_hour: float | None = None
    source: str
    products: tuple[ProductRate, ...] = ()
    copies: tuple[CopyRate, ...] = ()
    serving: tuple[ServingRate, ...] = ()

    def peak(self, rate: Rate) -> float | None:
        """FLOP/s of products in a format; None where the chip has none."""
        return dict(self.flops_per_s).get(rate)
