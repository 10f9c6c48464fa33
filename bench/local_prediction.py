"""Predicted against measured on this machine: step time, memory by category, traffic is a test (test_cost_traffic).

Every layout runs in ranks of its own, which take turns between steps and measuring themselves, so that whatever else
the machine does meets both. What is reported is the median step over the median prediction. Memory is that of tensors:
what stays from step to step, and the most that is alive beside it after an instruction.

    python -m bench.local_prediction [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from bench.alive import Born, Watch
from bench.machine import write_result
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory import rank_bytes
from superstep.cost.program.memory.memory_fit import by_category
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import predict
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.measure.probe_kernels import TimingOptions
from superstep.engine.measure.probe_machine import measure_here
from superstep.engine.tracing.trace_units import operations_of
from superstep.engine.values.microbatch import microbatches, rows
from superstep.launch.ranks import World, launch
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.program.compile import compile_step
from superstep.program.peak_memory import without_workspace

LAYOUTS: dict[str, tuple[str, dict]] = {
    "demo": ("demo", {"dp": 2, "zero": 2, "microbatch": 4}),
    "one rank": ("demo", {"dp": 1, "microbatch": 4}),
    "dp=2 zero=3": ("demo", {"dp": 2, "zero": 3, "microbatch": 4}),
    "pp=2": ("demo", {"dp": 1, "pp": 2, "microbatch": 4}),
    "tp=2": ("demo", {"dp": 1, "tp": 2, "microbatch": 4}),
    "experts, ep=2": ("demo-moe", {"dp": 2, "ep": 2, "microbatch": 4}),
    "cp=2": ("demo", {"dp": 1, "cp": 2, "microbatch": 4}),
    "pp=2 dp=2": ("demo", {"dp": 2, "pp": 2, "microbatch": 2}),
    "bench": ("bench", {"dp": 2, "microbatch": 2}),
}
STEPS = 4
"""Between two measurements."""


def run_of(name: str) -> Resolved:
    """The run of a layout."""
    model, plan = LAYOUTS[name]
    if model == "bench":
        config = RunConfig(
            model=ModelConfig(name="bench", vocab=4096),
            data=DataConfig(sequence_tokens=512),
            train=TrainConfig(batch_sequences=8),
        )
    else:
        config = RunConfig(model=ModelConfig(name=model))
    run = resolve(RunConfig(model=config.model, data=config.data, train=config.train, plan=PlanConfig(**plan)))
    return with_kept(run, Device("cpu"))


def turns(world: World, run: Resolved, seen: tuple[UnitOperations, ...], rounds: int) -> list[dict[str, float]]:
    """For each round, the median step of the slowest rank and what was predicted right after it."""
    torch.set_num_threads(1)
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=120))
    engine = Engine(run, units(run.shape), mesh)
    size, tokens = run.config.train.batch_sequences, run.config.data.sequence_tokens
    text = torch.randint(run.shape.vocab, (size, tokens + 1), generator=torch.Generator().manual_seed(0))
    mine = text[rows(run.plan, mesh)]
    batch = microbatches(mine[:, :-1], mine[:, 1:], run.plan, mesh)

    def step() -> float:
        start_s = time.perf_counter()
        engine.train_step(batch, valid_tokens=size * tokens, lr=1e-3)
        return time.perf_counter() - start_s

    for _ in range(2):
        step()
    found = []
    for _ in range(rounds):
        cpu_s = time.process_time()
        steps = [step() for _ in range(STEPS)]
        cpu_s = (time.process_time() - cpu_s) / STEPS
        machine = measure_here(run, seen, world, TimingOptions(device=Device("cpu"), budget_s=0.01))
        found.append(
            {
                "measured_s": max(gather(statistics.median(steps), float)),
                "measured_cpu_s": sum(gather(cpu_s, float)),
                "predicted_s": statistics.median(gather(predict(run, machine, seen).step_s, float)),
            }
        )
    stay = engine.bytes()
    with Born() as born:
        watch = Watch(born.noted, engine, batch)
        engine.train_step(batch, valid_tokens=size * tokens, lr=1e-3, record=watch)
    peak = max(alive + moved for alive, moved in zip(watch.alive, watch.transient, strict=True))
    held = stay.params + stay.gradients + stay.optimizer + peak
    found = [{**each, "measured_bytes": max(gather(held, int))} for each in found]
    mesh.destroy()
    return found


def report(name: str, rounds: int) -> dict:
    """One layout: medians over rounds, and the predicted memory of its fullest rank."""
    run = run_of(name)
    found = launch(run.plan.mesh.world, turns, run, operations_of(run, units(run.shape)), rounds)
    middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
    # What is measured is there between two instructions, without the batch.
    ranks = rank_bytes(run, compile_step(run.plan), without_workspace(unit_bytes(run)))
    fullest = max(ranks, key=lambda rank: rank.bytes)
    return {
        "layout": name,
        "ranks": run.plan.mesh.world,
        **middle,
        "ratio": middle["predicted_s"] / middle["measured_s"],
        "memory_ratio": (fullest.bytes - fullest.batch - fullest.peak.workspace_bytes) / middle["measured_bytes"],
        "rounds": found,
        "predicted_bytes": by_category(fullest),
    }


def _median_error(table: list[dict], key: str) -> float:
    return statistics.median(abs(row[key] - 1) for row in table)


def main(argv: list[str]) -> int:
    """Measure every layout, print a table, write JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.local_prediction", description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--layout", choices=LAYOUTS, action="append", help="default: all")
    options.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "local_prediction.json")
    asked = options.parse_args(argv)
    print(
        f"{'layout':16}{'ranks':>6}{'measured':>12}{'processor':>12}{'predicted':>12}{'ratio':>8}{'memory':>8}",
        flush=True,
    )
    table = []
    for name in asked.layout or LAYOUTS:
        row = report(name, asked.rounds)
        table.append(row)
        seconds = "".join(f"{row[key] * 1e3:>9.1f} ms" for key in ("measured_s", "measured_cpu_s", "predicted_s"))
        print(f"{name:16}{row['ranks']:>6}{seconds}{row['ratio']:>8.3f}{row['memory_ratio']:>8.3f}", flush=True)
        errors = {key: _median_error(table, key) for key in ("ratio", "memory_ratio")}
        write_result(asked.json, rounds=asked.rounds, steps=STEPS, median_errors=errors, layouts=table)
    print(f"median error {errors['ratio']:.1%} of time, {errors['memory_ratio']:.1%} of memory")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
