"""Measurement of a run's machine for the cost model: all ranks measure at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from superstep.comm.device import Device
from superstep.comm.objects import barrier
from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.cost.program.time.operation import Operation, UnitOperations
from superstep.engine.attention.choose_attention import is_compiled
from superstep.engine.measure.disk import direct_rates
from superstep.engine.measure.launch_cost import launch_s
from superstep.engine.measure.probe_collectives import COLLECTIVES, measure_collectives
from superstep.engine.measure.probe_kernels import TimingOptions, measure_operations
from superstep.hardware.chip import Chip, CopyRate, ProductRate
from superstep.hardware.cluster import Cluster, Collective, CollectiveRate
from superstep.hardware.host import cores
from superstep.launch.ranks import World
from superstep.plan.config import Dtype
from superstep.plan.resolution.resolve import Resolved

LINK = {"cpu": (4.4e9, 60e-6), "cuda": (4.5e11, 20e-6)}
"""Bytes/s and latency in seconds between two ranks, where they are not measured.

cpu: shared memory, two processes on two cores of an AMD EPYC (Zen 5): 16 MiB exchanged both ways took 3.9 ms, 4 bytes
56 µs (``bench/results/collectives.json``). cuda: one direction of NVLink 4 by its data sheet, not measured.
"""


def distinct(units: Iterable[UnitOperations]) -> tuple[Operation, ...]:
    """Every distinct operation of the units."""
    passes = [operations for unit in units for operations in (unit.forward, unit.backward, unit.weight)]
    return tuple(dict.fromkeys(operation for operations in passes for operation in operations))


def measure_here(
    run: Resolved, operations: Sequence[UnitOperations], world: World, timing: TimingOptions | None = None
) -> MeasuredMachine:
    """Measure this rank's machine with the run's own operations, in about a second. All ranks call this together."""
    timing = with_kernels_of(run, timing or TimingOptions(device=world.device))
    dtype = run.config.numerics.compute
    if world.size > 1:
        barrier(world.device)  # ranks that share caches and memory must run at the same time, as in a step
    # Where ranks share a core, the cost model adds the wait for the core to the whole step: count processor time here.
    shares_cores = world.device.kind == "cpu" and world.size > cores()
    own_time = replace(timing, clock=time.process_time) if shares_cores else timing
    products, copies = measure_operations(distinct(operations), dtype, own_time)
    mesh = run.plan.mesh
    degrees = {mesh.tp, mesh.cp, mesh.ep, mesh.pp, mesh.data, mesh.shards("dense")}
    rates = measure_collectives(world, degrees, timing, _collectives_of(run)) if world.size > 1 else ()
    here = measure_cluster(world.device, world.size, dtype, launch_s(own_time), (products, copies, rates))
    return _with_disk(here, run, world.size)


def measure(run: Resolved, device: Device, operations: Sequence[UnitOperations]) -> MeasuredMachine:
    """Measure one rank's machine in this process only; its links are those of ``LINK``."""
    dtype = run.config.numerics.compute
    timing = with_kernels_of(run, TimingOptions(device=device))
    with _threads(1 if run.plan.mesh.world > 1 else torch.get_num_threads()):
        products, copies = measure_operations(distinct(operations), dtype, timing)
        here = measure_cluster(device, run.plan.mesh.world, dtype, launch_s(timing), (products, copies, ()))
    return _with_disk(here, run, 1)


def _with_disk(machine: MeasuredMachine, run: Resolved, ranks: int) -> MeasuredMachine:
    """The same with the rates of the disk, where activations lie there; ``ranks`` measure it at the same time."""
    if "disk" not in run.plan.activations:
        return machine
    read, write = direct_rates(Path(run.config.state.dir))
    cluster = replace(machine.cluster, disk_read_bytes_per_s=ranks * read, disk_write_bytes_per_s=ranks * write)
    return replace(machine, cluster=cluster)


def with_kernels_of(run: Resolved, timing: TimingOptions) -> TimingOptions:
    """The timing options, with the kernels that the run uses."""
    return replace(timing, is_exact=run.plan.grain is not None, is_compiled=is_compiled(run, timing.device))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's number of threads for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _collectives_of(run: Resolved) -> tuple[Collective, ...]:
    """Collectives that a step of the run may have."""
    mesh = run.plan.mesh
    used: dict[Collective, bool] = {
        "all-reduce": mesh.tp > 1 or mesh.data > 1 or run.outline.is_tied,
        "all-gather": mesh.tp > 1 or mesh.data > 1,
        "reduce-scatter": mesh.data > 1 or mesh.tp > 1,
        "all-to-all": mesh.ep > 1 or mesh.cp > 1,
        "send": mesh.pp > 1 or mesh.cp > 1,
    }
    return tuple(name for name in COLLECTIVES if used[name])


def measure_cluster(
    device: Device,
    ranks: int,
    dtype: Dtype,
    launch: float,
    tables: tuple[tuple[ProductRate, ...], tuple[CopyRate, ...], tuple[CollectiveRate, ...]],
) -> MeasuredMachine:
    """A machine with these measured tables; memory, cores and name are read from the device and the host."""
    products, copies, rates = tables
    link_bytes_per_s, latency_s = LINK[device.kind]
    sends = [rate for rate in rates if rate.name == "send"]
    if sends:
        link_bytes_per_s, latency_s = sends[0].bytes_per_s, sends[0].latency_s
    chip = Chip(
        name=device_name(device),
        vendor="this machine",
        year=time.gmtime().tm_year,
        flops_per_s=((dtype, max((p.flops_per_s for p in products if p.kernel == "product"), default=1e9)),),
        memory_bytes=float(device.capacity_bytes()),
        memory_bytes_per_s=max((c.bytes, c.bytes_per_s) for c in copies if c.kernel == "copy")[1],
        cores=cores(),
        launch_s=launch,
        link_bytes_per_s=link_bytes_per_s,
        domain=ranks,
        source="superstep measure",
        products=products,
        copies=copies,
    )
    cluster = Cluster(
        chip=chip,
        chips=ranks,
        domain=ranks,
        link_bytes_per_s=link_bytes_per_s,
        link_latency_s=latency_s,
        network_bytes_per_s=link_bytes_per_s,
        network_latency_s=latency_s,
        collectives=rates,
    )
    return MeasuredMachine(cluster=cluster, rate=dtype, is_host=device.kind == "cpu")


def device_name(device: Device) -> str:
    """The model name of the device, as its driver or /proc/cpuinfo gives it."""
    if device.kind != "cpu":
        return device.name
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return "CPU"
