"""This machine, as the cost model knows it: how fast one rank multiplies, moves memory and sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from superstep.cost.predict import Machine
from superstep.cost.work import local_dims
from superstep.numerics.dtypes import DTYPES
from superstep.plan.resolve import Resolved
from superstep.runtime.device import Device

BUDGET_S = 0.08
"""How long each of the two measurements goes on."""

LARGEST = {"cpu": 768, "cuda": 8192}
"""The largest dim of the product: the rate rises little beyond, and one product is well within the budget."""

LONGEST = 2048
"""The largest dim of what is copied."""

KEPT_BYTES = 2**25
"""The copies lie side by side, as the activations of a forward pass do: on a CPU they outgrow the cache. Copies of
1.4 MB over one another ran at 34 GB/s, side by side at 15, which is nearer to what a step sees."""

LINK = {"cpu": (1.2e9, 70e-6), "cuda": (4.5e11, 20e-6)}
"""Bytes/s and seconds of latency between two ranks.

cpu: Gloo over loopback, two processes on two shared cores of a Xeon (torch 2.13): 1 MiB exchanged both ways took
0.7 to 1.1 ms, 1 KiB 60 to 70 µs. cuda: one direction of NVLink 4 as its data sheet has it, not measured.
"""


def measure(run: Resolved, device: Device) -> Machine:
    """One rank's machine, from products and copies of the run's own sizes, in less than 0.3 s."""
    d, dtype, largest = local_dims(run), DTYPES[run.config.numerics.compute], LARGEST[device.kind]
    rows, width, inner = (min(dim, largest) for dim in (d.T, d.D, d.F))
    x = torch.ones(rows, width, dtype=dtype, device=device.torch)
    weight = torch.ones(inner, width, dtype=dtype, device=device.torch)
    source = torch.ones(min(d.T, LONGEST) * min(d.F, LONGEST), dtype=dtype, device=device.torch)
    targets = [torch.empty_like(source) for _ in range(max(1, KEPT_BYTES // source.nbytes))]
    with _threads(1 if run.plan.mesh.world > 1 else torch.get_num_threads()):
        gemm_s = _seconds(lambda: F.linear(x, weight), device)
        copies_s = _seconds(lambda: [target.copy_(source) for target in targets], device)
    bytes_per_s, latency_s = LINK[device.kind]
    return Machine(
        gemm_flops_per_s=2 * rows * width * inner / gemm_s,
        memory_bytes_per_s=2 * len(targets) * source.nbytes / copies_s,
        link_bytes_per_s=bytes_per_s,
        link_latency_s=latency_s,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many threads as a launched rank has: one, where there are several."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object], device: Device) -> float:
    """What one call takes where nothing disturbs it: the fastest of as many as fit the budget."""
    work()
    device.synchronize()
    fastest_s = float("inf")
    end_s = time.perf_counter() + BUDGET_S
    while fastest_s == float("inf") or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        work()
        device.synchronize()
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return fastest_s
