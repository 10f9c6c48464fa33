"""Ranks of one side of a benchmark, as processes of their own, and what they measured as JSON has it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.peers_common import PeerResult

PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured: a named shape, and a step of it."""

    shape: str = "bench"
    vocab: int | None = None
    sequences: int = 8
    sequence_tokens: int = 512
    microbatch: int = 2
    steps: int = 6
    warmup: int = 2


Train = Callable[[int, int, dict, Workload], PeerResult]
"""(rank, world, settings, load): trains within a Gloo group that stands already."""


def measure(train: Train, world: int, settings: dict, load: Workload) -> dict:
    """Spawn the ranks of one side and put together what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(train, world, settings, load, folder), nprocs=world)
        ranks: list[PeerResult] = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    median_s = max(statistics.median(r.step_seconds[load.warmup :]) for r in ranks)
    return {
        "settings": settings,
        "world": world,
        "tokens_per_s": load.sequences * load.sequence_tokens / median_s,
        "median_step_s": median_s,
        "median_cpu_s": sum(statistics.median(r.cpu_seconds[load.warmup :]) for r in ranks),
        "step_seconds": [r.step_seconds for r in ranks],
        "training_bytes": [r.peak_rss_bytes - r.baseline_bytes for r in ranks],
        "peak_rss_bytes": [r.peak_rss_bytes for r in ranks],
        "losses": ranks[0].losses,
        "grad_norms": ranks[0].grad_norms,
    }


def _rank(rank: int, train: Train, world: int, settings: dict, load: Workload, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=PATIENCE)
    torch.save(train(rank, world, settings, load), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
