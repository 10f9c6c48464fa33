"""measure_links: latency and rate of each collective between the ranks of this run, by least squares over sizes.

    seconds = latency + bytes / rate       (the alpha-beta model; Hockney 1994)

Every size has the same weight: the fit minimises relative errors. All groups of one size run at once, as in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.comm.backend import reach
from superstep.comm.collectives import reduce_scatter, stack_ranks
from superstep.comm.mesh import Group
from superstep.comm.objects import barrier, gather
from superstep.engine.measure.probe_kernels import TimingOptions
from superstep.hardware.cluster import Collective, CollectiveRate
from superstep.launch.ranks import World
from superstep.launch.rendezvous import TIMEOUT

SIZES = {"cpu": (2**12, 2**16, 2**19, 2**21), "cuda": (2**12, 2**18, 2**22, 2**26)}
"""Bytes of the whole tensor on one rank. NVLink is still bound by latency at 2 MiB."""

REPEATS = 9

COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")


def measure_collectives(
    world: World, degrees: Iterable[int], gauge: TimingOptions, names: Sequence[Collective] = COLLECTIVES
) -> tuple[CollectiveRate, ...]:
    """Measure each collective in groups of neighbouring ranks. Every rank calls this together, and gets the same.

    Args:
        world: the launched ranks.
        degrees: sizes of groups; 1 and those that do not divide the ranks are skipped.
        gauge: of timing.
        names: of the collectives.
    """
    rates = []
    transport = reach(world.rank, world.size, world.device)
    for degree in sorted({d for d in degrees if d > 1 and world.size % d == 0}):
        firsts = range(0, world.size, degree)
        groups = [transport.group(range(f, f + degree), device=world.device, timeout=TIMEOUT) for f in firsts]
        group = groups[world.rank // degree]
        assert group is not None
        rates += [_rate(name, group, gauge) for name in names]
        dist.destroy_process_group(group)
    return tuple(rates)


def _rate(name: Collective, group: Group, gauge: TimingOptions) -> CollectiveRate:
    points = []
    # In a step a collective follows compute, during which waiting threads go to sleep.
    busy = torch.ones(512, 512, device=gauge.device.torch)
    for size in SIZES[gauge.device.kind]:
        # A whole number of parts: not every number of ranks is a power of two.
        numel = size // 4 // group.size() * group.size()
        buffer = torch.ones(numel, device=gauge.device.torch)
        work = _work(name, buffer, group)
        work()
        taken = []
        for _ in range(REPEATS):
            barrier(gauge.device, group)
            torch.mm(busy, busy)
            gauge.device.synchronize()
            start_s = gauge.clock()
            work()
            gauge.device.synchronize()
            taken.append(gauge.clock() - start_s)
        points.append((4 * numel, max(gather(statistics.median(taken), float))))
    latency_s, bytes_per_s = line(points)
    return CollectiveRate(name=name, ranks=group.size(), latency_s=latency_s, bytes_per_s=bytes_per_s)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and rate of the line through (bytes, seconds) with the least sum of squared relative errors; neither is
    negative.
    """
    # Weighted by 1/seconds, the equations are latency/t + bytes/(rate·t) = 1.
    ones = [(1 / t, size / t) for size, t in points]
    aa, ab, bb = (
        sum(u * v for u, v in pairs) for pairs in zip(*[((a, a), (a, b), (b, b)) for a, b in ones], strict=True)
    )
    a1, b1 = sum(a for a, _ in ones), sum(b for _, b in ones)
    determinant = aa * bb - ab * ab
    latency = (a1 * bb - b1 * ab) / determinant if determinant else 0.0
    slope = (b1 * aa - a1 * ab) / determinant if determinant else b1 / bb
    if latency < 0:
        latency, slope = 0.0, b1 / bb
    if slope <= 0:
        largest, longest_s = max(points)
        latency, slope = a1 / aa, longest_s / largest / len(points)
    return latency, 1 / slope


def _work(name: Collective, buffer: Tensor, group: Group) -> Callable[[], object]:
    size, me = group.size(), group.rank()
    match name:
        case "all-reduce":
            return lambda: dist.all_reduce(buffer, group=group)
        case "all-gather":
            # As for a unit's own wait; parameters are gathered in parallel with compute.
            own = buffer.chunk(size)[me]
            return lambda: stack_ranks(own, group)
        case "reduce-scatter":
            return lambda: reduce_scatter(buffer, group, tag=0).wait()
        case "all-to-all":
            given = torch.empty_like(buffer)
            return lambda: dist.all_to_all_single(given, buffer, group=group)
        case "send":
            # Around the ring, so that every rank sends and receives once, as neighbours in a pipeline do.
            arriving = torch.empty_like(buffer)
            ends = [
                dist.P2POp(dist.isend, buffer, group=group, group_peer=(me + 1) % size),
                dist.P2POp(dist.irecv, arriving, group=group, group_peer=(me - 1) % size),
            ]
            return lambda: [work.wait() for work in dist.batch_isend_irecv(ends)]
