"""Where the time of a step goes, part by part: one rank, the workload of the benchmarks.

    python -m bench.waterfall [--compute bf16 --compute fp32] [--json FILE]

Told are the seconds that pass in each operation as torch's dispatcher calls it, as shares of a step that nobody looks
at, with our kernels and with torch's; and how near the products come to the rate at which one of their shapes runs by
itself. What belongs to no operation, Python and the dispatcher, is the rest. Torch's profiler would not do: what it
notes lies between the pieces of memory that a step frees, which then are found anew page by page.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bench.machine import write_result
from bench.peers_common import random_batches
from bench.spawn import PATIENCE, Workload
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches
from superstep.kernels.product import linear, prefers_fp32, prefers_onednn
from superstep.model.axes import units
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.loss import _LinearCrossEntropySum
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve

ROOT = Path(__file__).resolve().parent.parent
PEAK = 1024, 512, 1408
"""Rows, inputs, outputs of the product that is measured by itself."""
PARTS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::", "superstep::product", "superstep::add_outer"),
    "attention": ("superstep::document_attention", "aten::_scaled_dot_product"),
    "norm, rope, gate": (
        *("superstep::rms_norm", "superstep::turn", "superstep::swiglu", "aten::_fused_rms_norm", "aten::silu"),
        *("aten::roll", "aten::addcmul", "aten::mul", "aten::pow", "aten::mean", "aten::rsqrt", "aten::sum"),
    ),
    "sums and copies": (
        *("aten::add", "aten::copy_", "aten::_to_copy", "aten::fill_", "aten::zero_", "aten::index_add_"),
        *("aten::embedding", "aten::index_select", "aten::cat", "aten::clone"),
    ),
}
"""Parts, and how the operations begin that are theirs. Others within the optimizer or the loss are theirs."""
WITHIN = "optimizer", "loss"


class Clock(TorchDispatchMode):
    """Seconds of each part while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys((*PARTS, *WITHIN, "rest"), 0.0)
        self.within: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start_s = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds[self.part_of(func.name())] += time.perf_counter() - start_s
        return out

    def part_of(self, name: str) -> str:
        """Of an operation: a product is one wherever it is called."""
        part = next((part for part, beginnings in PARTS.items() if name.startswith(beginnings)), "rest")
        return self.within[-1] if self.within and part != "products" else part


class Bench:
    """One rank of the engine, and batches for it."""

    def __init__(self, compute: str, kernels: str, load: Workload) -> None:
        config = RunConfig(
            model=ModelConfig(name=load.shape, vocab=load.vocab),
            data=DataConfig(sequence_tokens=load.sequence_tokens),
            train=TrainConfig(batch_sequences=load.sequences),
            plan=PlanConfig(microbatch=load.microbatch),
            numerics=NumericsConfig(compute=compute, kernels=kernels),  # type: ignore[arg-type]
        )
        self.run = resolve(config, 1)
        self.mesh = build_mesh(self.run.plan, 0, Device("cpu"), timeout=PATIENCE)
        self.engine = Engine(self.run, units(self.run.shape), self.mesh)
        self.clock: Clock | None = None
        optimizer = self.engine.optimizer
        optimizer.step = self._noted("optimizer", optimizer.step)  # type: ignore[method-assign]
        optimizer.sums = self._noted("optimizer", optimizer.sums)  # type: ignore[method-assign]
        self._forward = _LinearCrossEntropySum.forward
        self._batches = iter(random_batches(self.run.shape, load.steps, load.sequences, load.sequence_tokens))

    def _noted(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            if self.clock is None:
                return function(*given, **named)
            self.clock.within.append(part)
            try:
                return function(*given, **named)
            finally:
                self.clock.within.pop()

        return noted

    def seconds(self) -> dict[str, float]:
        """Of one step by part."""
        self.clock = Clock()
        _LinearCrossEntropySum.forward = staticmethod(self._noted("loss", self._forward))  # type: ignore[method-assign]
        try:
            with self.clock:
                self.step()
        finally:
            _LinearCrossEntropySum.forward = staticmethod(self._forward)  # type: ignore[method-assign]
        found, self.clock = self.clock.seconds, None
        return found

    @property
    def product_flops(self) -> int:
        """Of a step: six for each token and each weight of a matrix that is multiplied (Kaplan 2020, table 1)."""
        buffers = [b for unit, each in self.engine.buffers.items() if unit > 0 for b in each]
        config = self.run.config
        return 6 * sum(b.layout.decayed for b in buffers) * config.data.sequence_tokens * config.train.batch_sequences

    def step(self) -> tuple[float, float]:
        """Seconds of one step by the wall, and of the processor."""
        tokens, targets = next(self._batches)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        mine = microbatches(tokens, targets, self.run.plan, self.mesh)
        self.engine.train_step(mine, valid_tokens=targets.numel(), lr=1e-3)
        return time.perf_counter() - start_s, time.process_time() - cpu_s


def peak_flops_per_s(compute: str) -> float:
    """Of one product by itself, as a step computes it, by the processor's clock."""
    rows, inputs, outputs = PEAK
    x, weight = (torch.randn(shape).to(DTYPES[compute]) for shape in ((rows, inputs), (outputs, inputs)))  # type: ignore[index]
    taken = []
    for _ in range(9):
        begin_s = time.process_time()
        linear(x, weight)
        taken.append(time.process_time() - begin_s)
    return 2 * rows * inputs * outputs / statistics.median(taken)


def rows(computes: list[str], load: Workload) -> Iterator[Mapping[str, object]]:
    """One for each dtype and each choice of kernels, printed as they come."""
    for compute in computes:
        peak = peak_flops_per_s(compute)
        for kernels in ("auto", "torch"):
            bench = Bench(compute, kernels, load)
            bench.step()
            plain = [bench.step() for _ in range((load.steps - 1) // 2)]
            each = [bench.seconds() for _ in range(load.steps // 2)]
            seconds = {part: statistics.median(step[part] for step in each) for part in each[0]}
            cpu_s = statistics.median(cpu for _, cpu in plain)
            seconds["rest"] = cpu_s - sum(s for part, s in seconds.items() if part != "rest")
            shares = {part: round(s / cpu_s, 4) for part, s in seconds.items()}
            found = {
                "compute": compute,
                "kernels": kernels,
                "cpu_s": cpu_s,
                "seconds": seconds,
                "shares": shares,
                "product_flops": bench.product_flops,
                "alone_flops_per_s": peak,
                "of_that_rate": round(bench.product_flops / (cpu_s * shares["products"]) / peak, 3),
            }
            print(compute, kernels, f"{cpu_s:.2f} s of the processor", shares, found["of_that_rate"], flush=True)
            yield found


def main(argv: list[str]) -> None:
    """Measure, print, and write the figures."""
    options = argparse.ArgumentParser(prog="python -m bench.waterfall", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--compute", choices=("bf16", "fp32"), action="append", help="default: both")
    options.add_argument("--vocab", type=int, default=4096)
    options.add_argument("--steps", type=int, default=9, help="half of those after the first by the clock")
    options.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "waterfall.json")
    asked = options.parse_args(argv)
    torch.set_num_threads(1)
    load = Workload(vocab=asked.vocab, steps=asked.steps)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=PATIENCE)
        found = []
        for row in rows(asked.compute or ["bf16", "fp32"], load):  # what is there stays, should a later one be cut off
            found.append(row)
            write_result(asked.json, prefers_fp32=prefers_fp32(), prefers_onednn=prefers_onednn(), rows=found)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
