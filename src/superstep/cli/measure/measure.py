"""superstep measure: this machine's rates: a cluster file, a table, and a roofline with a model on it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from superstep.cli.arguments.measure import MeasureOptions, run_of
from superstep.cli.arguments.measure import read as read_arguments
from superstep.cli.flags.new_file import write_new_file
from superstep.cli.measure.roofline import Roofline, RooflinePoint, draw_svg, draw_text
from superstep.cli.serve.serve_settings import kernels_folder
from superstep.comm.device import choose, gpus
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
from superstep.engine.measure.disk import SIZE, disk_rates
from superstep.engine.measure.launch_cost import launch_s
from superstep.engine.measure.probe_collectives import measure_collectives
from superstep.engine.measure.probe_kernels import TimingOptions, measure_operations
from superstep.engine.measure.probe_machine import distinct, measure_cluster, with_kernels_of
from superstep.errors import ConfigError
from superstep.hardware.cluster_file import write_cluster
from superstep.hardware.host import cores
from superstep.hardware.serving_rate import ServingRate
from superstep.launch.ranks import World, launch_on
from superstep.observe.number_format import bytes_text, rate_text, seconds_text
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.benchmark_steps import USUAL, calibrate
from superstep.serve.config import ServeConfig
from superstep.state.fsync import free_bytes
from superstep.train.weights.model import operations

SIDES = (64, 256, 1024, 4096)
"""Sides of the measured products, besides a model's own shapes."""

PEAK_SIDE = {"cpu": 1024, "cuda": 8192}
"""Of a square product that reaches a chip's rate; those of a small model are done by a GPU in the time of a launch."""

LARGE = 2**23
"""Bytes beyond any cache of one core."""
LENGTHS = (128, 512, 2048)
"""Sequence lengths of measured attention."""


def main(argv: Sequence[str]) -> int:
    """Measure, print and write."""
    options = read_arguments(argv)
    place = Path(options.out).parent if options.out else Path(tempfile.gettempdir())
    _require_room(place)
    most = max(2, cores()) if choose(options.device) == "cpu" else gpus()
    ranks = most if options.ranks is None else options.ranks
    run = run_of(options.model, options.dtype)
    units = operations(run)
    assert units is not None, "our own decoder always can be seen"
    side = PEAK_SIDE[choose(options.device)]
    grid = [MatmulOperation(rows=side, width=side, inner=side), *([] if options.quick else _grid())]
    start_s = time.perf_counter()
    measurement = launch_on(
        options.device, ranks, _rank, run, (*distinct(units), *grid), 0.005 if options.quick else 0.02
    )
    with tempfile.TemporaryDirectory(dir=place) as folder:
        read, write = disk_rates(Path(folder))
    cluster = replace(measurement.cluster, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write)
    ways = [serving_rate(run, way, options) for way in options.serve]
    cluster = replace(cluster, chip=replace(cluster.chip, serving=tuple(ways)))
    measurement = replace(measurement, cluster=cluster)
    points, roof = list(_points(run, units, measurement)), _roof(measurement)
    _say("\n".join([*_table(measurement), "", *draw_text(roof, points)]))
    _say(f"\nmeasured in {seconds_text(time.perf_counter() - start_s)}, on {ranks} ranks at once")
    if options.plot:
        write_new_file(Path(options.plot), draw_svg(roof, points))
        _say(f"picture in {options.plot}")
    if options.out:
        write_new_file(Path(options.out), write_cluster(cluster))
        _say(f"cluster file in {options.out}")
    return 0


def _require_room(folder: Path) -> None:
    """Check that the test file of the disk's measurement fits, before anything is measured.

    Raises:
        ConfigError: it does not.
    """
    free = free_bytes(folder)
    if free < SIZE:
        raise ConfigError(
            f"the disk is measured with a file of {bytes_text(SIZE)} in '{folder}', which has {bytes_text(free)} left; "
            f"make room, or name a file of a disk with more room by --out."
        )


def serving_rate(run: Resolved, way: str, options: MeasureOptions) -> ServingRate:
    """The rate of a server's steps here, in one format."""
    if run.decoder is None:
        raise ConfigError("--serve measures servers of the decoder; leave --model to a named size.")
    dtype, _, special = way.partition("-")
    serve = ServeConfig(
        compute="bf16" if dtype == "bf16" else "fp32",
        exact=special == "exact",
        quantize="" if special == "exact" else special,
        tp=options.serve_tp,
        kernels=kernels_folder(None),
    )
    # The demo's weights stay in a cache; the stored rates of other models are measured on larger ones.
    return calibrate(USUAL if options.model == "demo" else run.decoder, serve, choose(options.device, options.serve_tp))


def _grid() -> Iterator[Operation]:
    for rows in SIDES:
        for width in SIDES[:-1]:
            for inner in SIDES[:-1]:
                yield MatmulOperation(rows=rows, width=width, inner=inner)
    for side in SIDES[1:-1]:
        for tokens in SIDES[1:]:
            yield MatmulOperation(rows=side, width=side, inner=tokens, kernel="gradient")
    for length in LENGTHS:
        for is_backward in (False, True):
            yield AttentionOperation(heads=8, queries=length, keys=length, head_dim=64, is_backward=is_backward)
    for kernel in ("exp", "softmax", "gather"):
        yield MemoryOperation(kernel=kernel, bytes=0)


def _rank(world: World, run: Resolved, wanted: tuple[Operation, ...], budget_s: float) -> MeasuredMachine:
    """The measurement of one rank, in parallel with the others."""
    gauge = with_kernels_of(run, TimingOptions(device=world.device, budget_s=budget_s))
    dtype = run.config.numerics.compute
    products, copies = measure_operations(wanted, dtype, gauge)
    degrees = [n for n in range(2, world.size + 1) if world.size % n == 0]
    rates = measure_collectives(world, degrees, gauge) if degrees else ()
    return measure_cluster(world.device, world.size, dtype, launch_s(gauge), (products, copies, rates))


def _table(measurement: MeasuredMachine) -> Iterator[str]:
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


def _roof(measurement: MeasuredMachine) -> Roofline:
    """The fastest product, and the fastest memory traffic beyond the caches."""
    large = [c.bytes_per_s for c in measurement.cluster.chip.copies if c.bytes >= LARGE]
    return Roofline(
        flops_per_s=max(p.flops_per_s for p in measurement.cluster.chip.products),
        bytes_per_s=max(large, default=measurement.memory_bytes_per_s),
    )


def _points(run: Resolved, units: Sequence[UnitOperations], measurement: MeasuredMachine) -> Iterator[RooflinePoint]:
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


def _say(text: str) -> None:
    print(text, flush=True, file=sys.stdout)
