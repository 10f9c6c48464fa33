"""Rates of this machine in a second, for choices that weigh computing against copies to a disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from superstep.cost.program.time.op_prices import MachineRates
from superstep.engine.measure.disk import direct_rates
from superstep.hardware.host import cores
from superstep.numerics.dtypes import DTYPES
from superstep.plan.config import Dtype

WIDTH, COPIED_BYTES, REPEATS = 512, 2**25, 5
LINK_BYTES_PER_S, LINK_LATENCY_S = 2e9, 20e-6


def probe_rates(dtype: Dtype, folder: Path, ranks: int) -> MachineRates:
    """The rates that each of ``ranks`` ranks has on the CPUs of this host, and of the disk of a folder. Raises as
    ``direct_rates``.
    """
    threads = torch.get_num_threads() if ranks == 1 else 1
    share = min(1.0, cores() / ranks)
    left = torch.ones(WIDTH, WIDTH, dtype=DTYPES[dtype])
    source = torch.ones(COPIED_BYTES // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product_s, copy_s = _median_s(lambda: left @ left), _median_s(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)
    return MachineRates(
        gemm_flops_per_s=share * 2 * WIDTH**3 / product_s,
        memory_bytes_per_s=share * COPIED_BYTES / copy_s,
        link_bytes_per_s=LINK_BYTES_PER_S,
        link_latency_s=LINK_LATENCY_S,
        disk_bytes_per_s=min(direct_rates(folder)) / ranks,
    )


def _median_s(run: Callable[[], object]) -> float:
    run()
    times_s = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)
