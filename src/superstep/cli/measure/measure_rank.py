"""The measurement of one rank: products, attention, memory, launches and collectives."""

from __future__ import annotations

from collections.abc import Iterator

from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.cost.program.time.operation import (
    AttentionOperation,
    MatmulOperation,
    MemoryOperation,
    Operation,
)
from superstep.engine.measure.launch_cost import launch_s
from superstep.engine.measure.probe_collectives import measure_collectives
from superstep.engine.measure.probe_kernels import TimingOptions, measure_operations
from superstep.engine.measure.probe_machine import measure_cluster, with_kernels_of
from superstep.launch.ranks import World
from superstep.plan.config import DeviceKind
from superstep.plan.resolution.resolve import Resolved

SIDES = (64, 256, 1024, 4096)
"""Sides of the measured products, besides a model's own shapes."""

PEAK_SIDE = {"cpu": 1024, "cuda": 8192}
"""Of a square product that reaches a chip's rate; those of a small model are done by a GPU in the time of a launch."""

LENGTHS = (128, 512, 2048)
"""Sequence lengths of measured attention."""


def operations_of(device: DeviceKind, *, is_quick: bool) -> list[Operation]:
    """The measured operations besides a model's own: a large product, and unless ``is_quick`` a grid of shapes."""
    side = PEAK_SIDE[device]
    return [MatmulOperation(rows=side, width=side, inner=side), *([] if is_quick else _grid())]


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


def measure_rank(world: World, run: Resolved, wanted: tuple[Operation, ...], budget_s: float) -> MeasuredMachine:
    """The measurement of one rank, in parallel with the others."""
    gauge = with_kernels_of(run, TimingOptions(device=world.device, budget_s=budget_s))
    dtype = run.config.numerics.compute
    products, copies = measure_operations(wanted, dtype, gauge)
    degrees = [n for n in range(2, world.size + 1) if world.size % n == 0]
    rates = measure_collectives(world, degrees, gauge) if degrees else ()
    return measure_cluster(world.device, world.size, dtype, launch_s(gauge), (products, copies, rates))
