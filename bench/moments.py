"""AdamW with moments in 8 bits: bytes, and the time of an update beside fp32 moments and beside other libraries.

    python -m bench.moments [--elements 1048576 16777216] [--rounds 9] [--json bench/results/moments.json]

Each side updates one tensor on one thread, a round each in turn; the figure is the median of processor time, and the
ratio the median over the rounds. "fp32" is torch's fused AdamW. bitsandbytes and torchao (compiled) take part where
they are installed. The bytes are those of the demo's moments, for each parameter that has them in 8 bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.machine import write_result
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.kernels.blocks.adamw import BlockMoment
from superstep.kernels.blocks.dynamic_map import SIZE, dynamic_map
from superstep.kernels.philox import random_words
from superstep.model.axes import units
from superstep.numerics.narrow.narrow_update import NarrowPart, is_signed, update_narrow
from superstep.numerics.noise import SamplePlace
from superstep.numerics.update_rules import RULES, OptimizerSettings, UpdateNumbers
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.optimizers import Moment
from superstep.plan.resolution.resolve import resolve

SETTINGS = OptimizerSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
MOMENTS: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq")
Update = Callable[[int], None]
"""The update of a number, from 1 on."""


def draw_words(kind: str, number: int, low: int, high: int) -> Tensor:
    """Random words of elements, as the engine draws them."""
    counter = SamplePlace(seed=0, step=number).counter(kind)
    return random_words(counter, torch.tensor([low]), 1, high - low).view(-1)


def in_fp32(param: Tensor, grad: Tensor) -> Update:
    """Torch's fused AdamW, as the engine calls it."""
    moments = [[torch.zeros_like(param)] for _ in MOMENTS]
    fused = RULES["adamw"].fused
    assert fused is not None
    return lambda number: fused([param], [grad], moments, SETTINGS, numbers(number))


def in_8bit(param: Tensor, grad: Tensor) -> Update:
    """Both moments in blocks."""
    zero = {m: dynamic_map(is_signed=is_signed(m)).zero for m in MOMENTS}
    count = param.numel()
    kept = {
        m: BlockMoment(torch.full((count,), zero[m], dtype=torch.uint8), torch.zeros(count // SIZE)) for m in MOMENTS
    }
    part = NarrowPart(param, grad, dict(kept), draw_words)
    return lambda number: update_narrow(part, RULES["adamw"], SETTINGS, numbers(number))


def in_bf16(param: Tensor, grad: Tensor) -> Update:
    """Both moments rounded stochastically."""
    part = NarrowPart(param, grad, {m: torch.zeros_like(param, dtype=torch.bfloat16) for m in MOMENTS}, draw_words)
    return lambda number: update_narrow(part, RULES["adamw"], SETTINGS, numbers(number))


def numbers(number: int) -> UpdateNumbers:
    """Those of an update."""
    return UpdateNumbers(lr=1e-3, decay=0.1, scale=1.0, number=number)


def by_peer(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Tensor, Tensor], Update]:
    """Another library's optimizer."""

    def build(param: Tensor, grad: Tensor) -> Update:
        own = nn.Parameter(param)
        own.grad = grad
        optimizer = make([own], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
        return lambda _: optimizer.step()

    return build


def list_sides() -> dict[str, Callable[[Tensor, Tensor], Update]]:
    """What is measured here."""
    sides = {"fp32": in_fp32, "8bit": in_8bit, "bf16": in_bf16}
    if importlib.util.find_spec("bitsandbytes"):
        sides["bitsandbytes 8bit"] = by_peer(importlib.import_module("bitsandbytes").optim.AdamW8bit)
    if importlib.util.find_spec("torchao"):
        sides["torchao 8bit"] = by_peer(importlib.import_module("torchao.optim").AdamW8bit)
    return sides


def measure(count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of each side: processor nanoseconds of an element, and how many times those of fp32."""
    grad, first = torch.randn(count) * 1e-3, torch.randn(count)
    updates = {name: make(first.clone(), grad) for name, make in list_sides().items()}
    taken: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(1, rounds + 2):
        for name, update in updates.items():
            begin_s = time.process_time()
            update(number)
            if number > 1:  # the first one compiles
                taken[name].append((time.process_time() - begin_s) / count * 1e9)
    return {
        name: {
            "ns": round(statistics.median(each), 3),
            "over_fp32": round(statistics.median(a / b for a, b in zip(each, taken["fp32"], strict=True)), 3),
        }
        for name, each in taken.items()
    }


def count_bytes() -> dict[str, float]:
    """Of the demo with moments in 8 bits: parameters that have them, their share, and bytes for each."""
    run = resolve(
        RunConfig(
            model=ModelConfig(name="demo"), train=TrainConfig(moments="8bit"), plan=PlanConfig(dp=1, device="cpu")
        )
    )
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
    buffers = [b for _, b in Engine(run, units(run.shape), mesh).each_buffer()]
    narrow = sum(b.narrow for b in buffers)
    kept = [t for b in buffers for m in b.narrow_moments.values() if isinstance(m, BlockMoment) for t in m.tensors]
    return {
        "parameters": narrow,
        "share": round(narrow / sum(b.master.numel() for b in buffers), 3),
        "bytes": round(sum(t.nbytes for t in kept) / narrow, 4),
    }


def main(argv: Sequence[str]) -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[2**20, 2**24])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    kept, updates = count_bytes(), {str(count): measure(count, given.rounds) for count in given.elements}
    sys.stdout.write(json.dumps({"kept": kept, "updates": updates}, indent=1) + "\n")
    if given.json is not None:
        write_result(given.json, kept=kept, updates=updates)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
