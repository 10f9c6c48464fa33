"""This machine, as the cost model knows it: how fast one rank multiplies, moves memory and sends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from superstep.cost.predict import Machine
from superstep.cost.work import local_dims
from superstep.plan.resolve import Resolved
from superstep.runtime.device import Device
from superstep.runtime.engine import DTYPES

BUDGET_S = 0.1
"""How long each of the two measurements goes on."""

LARGEST = {"cpu": 768, "cuda": 8192}
"""The largest dim of a measured product: the rate does not rise any more, and one product is well within budget."""

LINK = {"cpu": (1.2e9, 70e-6), "cuda": (4.5e11, 20e-6)}
"""Bytes/s and seconds of latency between two ranks.

cpu: Gloo over loopback, two processes on two shared cores of a Xeon (torch 2.13): 1 MiB exchanged both ways took
0.7 to 1.1 ms, 1 KiB 60 to 70 µs. cuda: one direction of NVLink 4 as its data sheet has it, not measured.
"""


def measure(run: Resolved, device: Device) -> Machine:
    """One rank's machine, from a product and a copy as the run has them, in less than 0.3 s.

    It is measured with the threads this process has: a rank has one.
    """
    d, dtype, largest = local_dims(run), DTYPES[run.config.numerics.compute], LARGEST[device.kind]
    rows, width, inner = (min(dim, largest) for dim in (d.T, d.D, d.F))
    x = torch.ones(rows, width, dtype=dtype, device=device.torch)
    weight = torch.ones(inner, width, dtype=dtype, device=device.torch)
    gemm_s = _seconds(lambda: F.linear(x, weight), device)
    source = torch.ones(d.T * d.F, dtype=dtype, device=device.torch)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source), device)
    bytes_per_s, latency_s = LINK[device.kind]
    return Machine(
        gemm_flops_per_s=2 * rows * width * inner / gemm_s,
        memory_bytes_per_s=2 * source.nbytes / copy_s,
        link_bytes_per_s=bytes_per_s,
        link_latency_s=latency_s,
    )


def _seconds(work: Callable[[], object], device: Device) -> float:
    """What one call takes: the median of as many as fit the budget, after one that does not count."""
    work()
    device.synchronize()
    taken: list[float] = []
    end_s = time.perf_counter() + BUDGET_S
    while not taken or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        work()
        device.synchronize()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)
