"""What exact mode costs: its steps against fast mode's on the demo model, for each axis.

Both engines live in the same ranks and take turns, step by step, so that whatever else the machine does meets both. A
pair of steps gives one ratio; what is reported is the median over pairs, of wall time and of processor time.

    python -m bench.exact_cost [--pairs 12] [--dtype fp32 ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from bench.machine import write_result
from superstep.comm.mesh import Mesh, build_mesh
from superstep.comm.objects import gather
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import Microbatch, microbatches, rows
from superstep.launch.ranks import World, launch
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved, resolve

AXES = {
    "one rank": {},
    "dp=2 zero=2": {"dp": 2, "zero": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "pp=2 1f1b": {"pp": 2},
    "pp=2 zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "tp=2": {"tp": 2},
    "cp=2 ring": {"cp": 2},
    "cp=2 ulysses": {"cp": 2, "context": "ulysses"},
    "experts, one rank": {},
    "experts, dp=2 ep=2": {"dp": 2, "ep": 2},
}


def run_of(name: str, dtype: str, *, exact: bool) -> Resolved:
    """The demo model and its batch, in one mode."""
    config = RunConfig(
        model=ModelConfig(name="demo-moe" if "experts" in name else "demo"),
        data=DataConfig(),
        train=TrainConfig(),
        plan=PlanConfig(**{"microbatch": 4, **AXES[name]}),
        numerics=NumericsConfig(compute=dtype),
    )
    return resolve(replace(config, numerics=replace(config.numerics, exact=exact)))


def pairs_of_steps(world: World, name: str, dtype: str, pairs: int) -> list[dict[str, float]]:
    """Seconds of each pair of steps: wall time of the slowest rank, processor time of all."""
    torch.set_num_threads(1)
    sides = [_Side(world, run_of(name, dtype, exact=exact)) for exact in (False, True)]
    found = []
    for pair in range(pairs + 1):
        order = sides if pair % 2 else sides[::-1]
        spent = {id(side): side.step() for side in order}
        every = gather([spent[id(side)] for side in sides], list[tuple[float, float]])
        if pair:  # the first one warms up
            fast, exact = ([rank[i] for rank in every] for i in range(2))
            found.append(
                {
                    "fast_s": max(wall for wall, _ in fast),
                    "exact_s": max(wall for wall, _ in exact),
                    "fast_cpu_s": sum(cpu for _, cpu in fast),
                    "exact_cpu_s": sum(cpu for _, cpu in exact),
                }
            )
    for side in sides:
        side.mesh.destroy()
    return found


class _Side:
    """One engine and its batch."""

    def __init__(self, world: World, run: Resolved) -> None:
        self.mesh: Mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=120))
        self._engine = Engine(run, units(run.shape), self.mesh)
        size, tokens = run.config.train.batch_sequences, run.config.data.sequence_tokens
        random = torch.Generator().manual_seed(0)
        text = torch.randint(run.shape.vocab, (size, tokens + 1), generator=random)
        self._valid = size * tokens
        mine = text[rows(run.plan, self.mesh)]
        self._batch: list[Microbatch] = microbatches(mine[:, :-1], mine[:, 1:], run.plan, self.mesh)

    def step(self) -> tuple[float, float]:
        """Wall and processor seconds of one step."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        self._engine.train_step(self._batch, valid_tokens=self._valid, lr=1e-3)
        return time.perf_counter() - wall_s, time.process_time() - cpu_s


def summary(found: list[dict[str, float]]) -> dict[str, object]:
    """Medians over pairs."""
    wall, cpu = ([p[f"exact{kind}_s"] / p[f"fast{kind}_s"] for p in found] for kind in ("", "_cpu"))
    return {
        "time_ratio": statistics.median(wall),
        "cpu_ratio": statistics.median(cpu),
        "time_ratios": wall,
        "cpu_ratios": cpu,
        "fast_s": statistics.median(p["fast_s"] for p in found),
        "exact_s": statistics.median(p["exact_s"] for p in found),
    }


def main(argv: list[str]) -> int:
    """Measure, print a table, write JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.exact_cost", description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=12)
    options.add_argument("--dtype", choices=("fp32", "bf16"), action="append", help="default: both")
    options.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "exact_cost.json")
    asked = options.parse_args(argv)
    workload = {
        "model": "demo, demo-moe",
        "sequences": 16,
        "sequence_tokens": 256,
        "microbatch": 4,
        "pairs": asked.pairs,
    }
    table = []
    print(f"{'layout':24}{'dtype':>7}{'fast':>10}{'exact':>10}{'time':>8}{'cpu':>8}", flush=True)
    for dtype in asked.dtype or ("fp32", "bf16"):
        for name in AXES:
            world = run_of(name, dtype, exact=False).plan.mesh.world
            row = summary(launch(world, pairs_of_steps, name, dtype, asked.pairs))
            table.append({"layout": name, "dtype": dtype, **row})
            seconds = f"{row['fast_s']:>8.3f} s{row['exact_s']:>8.3f} s"
            print(f"{name:24}{dtype:>7}{seconds}{row['time_ratio']:>7.2f}x{row['cpu_ratio']:>7.2f}x", flush=True)
            write_result(asked.json, workload=workload, layouts=table)  # what is there stays, if this is cut off
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
