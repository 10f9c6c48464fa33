"""The rates of a machine as lines of text, and as a roofline with a model on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superstep.cli.measure.roofline import Roofline, RooflinePoint
from superstep.cost.program.time.op_prices import MeasuredMachine, seconds
from superstep.cost.program.time.operation import (
    AttentionOperation,
    MatmulOperation,
    MemoryOperation,
    Operation,
    Operations,
    UnitOperations,
    flops,
)
from superstep.observe.number_format import bytes_text, rate_text, seconds_text
from superstep.plan.resolution.resolve import Resolved

LARGE = 2**23
"""Bytes beyond any cache of one core."""


def rate_lines(measurement: MeasuredMachine) -> Iterator[str]:
    """A line for each kind of rate."""
    cluster, chip = measurement.cluster, measurement.cluster.chip
    yield f"{chip.name}, {chip.cores} cores, {bytes_text(chip.memory_bytes)}"
    products = sorted((p for p in chip.products if p.kernel == "product"), key=lambda p: p.flops_per_s)
    for name, product in (("slowest product", products[0]), ("fastest product", products[-1])):
        shape = f"[{product.rows}, {product.inner}] x [{product.inner}, {product.width}]"
        yield f"{name:18}{rate_text(product.flops_per_s):>14}   {product.rate} {shape}"
    for kernel in dict.fromkeys(p.kernel for p in chip.products if p.kernel != "product"):
        rates = [p.flops_per_s for p in chip.products if p.kernel == kernel]
        of = {"gradient": " of a weight", "batch": " of many narrow ones"}.get(kernel, ", full square")
        yield f"{kernel:18}{rate_text(min(rates)):>14} to {rate_text(max(rates))}{of}"
    for kernel in dict.fromkeys(c.kernel for c in chip.copies):
        copies = sorted((c for c in chip.copies if c.kernel == kernel), key=lambda c: c.bytes)
        each = "   ".join(f"{bytes_text(c.bytes)} {c.bytes_per_s / 1e9:.3g}" for c in copies)
        yield f"{kernel:18}GB/s at   {each}"
    yield f"{'launch':18}{seconds_text(chip.launch_s):>12}"
    for rate in cluster.collectives:
        latency = seconds_text(rate.latency_s)
        yield f"{rate.name:18}{latency:>12} + bytes / {rate.bytes_per_s / 1e9:.3g} GB/s   {rate.ranks} ranks"
    for way in chip.serving:
        yield f"{'serving':18}{way.way}, {way.tp} to a model: steps within {way.spread:.1%} in the median"
    if cluster.disk_read_bytes_per_s and cluster.disk_write_bytes_per_s:
        read, write = cluster.disk_read_bytes_per_s / 1e9, cluster.disk_write_bytes_per_s / 1e9
        yield f"{'disk':18}{read:.3g} GB/s read, {write:.3g} GB/s written"


def roof_of(measurement: MeasuredMachine) -> Roofline:
    """The fastest product, and the fastest memory traffic beyond the caches."""
    large = [c.bytes_per_s for c in measurement.cluster.chip.copies if c.bytes >= LARGE]
    return Roofline(
        flops_per_s=max(p.flops_per_s for p in measurement.cluster.chip.products),
        bytes_per_s=max(large, default=measurement.memory_bytes_per_s),
    )


def model_points(
    run: Resolved, units: Sequence[UnitOperations], measurement: MeasuredMachine
) -> Iterator[RooflinePoint]:
    """The units of the model: embedding, a block's forward and backward, its attention, the head, and the optimizer."""
    block = units[1]
    ways: list[tuple[str, Operations]] = [
        ("embedding", units[0].forward),
        ("block forward", block.forward),
        ("block backward", block.backward),
        ("attention", tuple(o for o in block.forward if isinstance(o, AttentionOperation))),
        ("head", units[-1].forward),
    ]
    for name, way in ways:
        size, taken_s = sum(map(_bytes, way)), seconds(way, measurement, lambda axis: 1)
        yield RooflinePoint(name=name, flops=flops(way), bytes=size, seconds=taken_s)
    # AdamW: about 12 operations and 28 bytes for each parameter.
    numel = run.outline.numel
    yield RooflinePoint(
        name="optimizer", flops=12 * numel, bytes=28 * numel, seconds=measurement.pass_s("update", 28 * numel)
    )


def _bytes(operation: Operation) -> int:
    """Bytes that an operation reads and writes."""
    match operation:
        case MatmulOperation():
            return 4 * operation.count * operation.numel
        case AttentionOperation(heads=heads, queries=queries, keys=keys, head_dim=width):
            return 4 * operation.count * heads * width * 2 * (queries + keys)
        case MemoryOperation():
            return operation.count * operation.bytes
        case _:
            return 0
