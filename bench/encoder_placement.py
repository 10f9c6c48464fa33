"""Where an encoder of pictures runs: the steps of each place, as predicted and as measured, on two pipeline ranks.

The model has the shape of Qwen3-VL. Samples have no to four pictures of uneven sizes and some text; they are packed
into rows of a fixed capacity. Each place runs in rank processes of its own, in turn, round after
round, so that other work on the machine meets all of them. Figures are medians over the rounds:

    measured    the median step of the slowest rank, by the clock of the wall
    processor   the program on a clock, where each instruction takes its processor seconds: the step without other work
    predicted   from the run's operations, measured in processor seconds right after the steps of each place
    slowest     the busy processor seconds of the slowest rank over the mean of both

    python -m bench.encoder_placement [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bench.machine import write_result
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import predict
from superstep.cost.program.time.simulate import simulate
from superstep.data.sources.source import open_source, stream_of
from superstep.engine.engine import Engine
from superstep.engine.instruction_timer import HostRecorder
from superstep.engine.measure.probe_kernels import TimingOptions
from superstep.engine.measure.probe_machine import measure_here
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.launch.ranks import World, launch
from superstep.plan.config import (
    DataConfig,
    ModelConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_step
from superstep.program.instructions import Instruction, Recv, Send
from superstep.train.weights.model import operations, resolve_config, units_of

SAMPLES = Path(__file__).with_name("encoder_samples.py")
PLACES: dict[str, dict[str, Any]] = {
    "front": {"encoder": "front"},
    "front, stages by hand": {"encoder": "front", "stages": (4, 9)},
    "spread": {"encoder": "spread"},
    "bubbles": {"encoder": "bubbles"},
}
STEPS, WARM_UP = 4, 2
SECONDS = "measured_s", "processor_s", "predicted_s"


def run_of(place: str, microbatches: int) -> Resolved:
    """The run with its encoder in one place."""
    config = RunConfig(
        model=ModelConfig(source=str(SAMPLES)),
        data=DataConfig(source=str(SAMPLES)),
        train=TrainConfig(batch_sequences=microbatches),
        plan=PlanConfig(pp=2, dp=1, microbatch=1, **PLACES[place]),
    )
    return resolve_config(config)


def measure_round(
    world: World, run: Resolved, seen: Sequence[UnitOperations], number: int
) -> tuple[dict[str, float], MeasuredMachine]:
    """One round of one place: its seconds, and the machine right after it."""
    torch.set_num_threads(1)
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=300))
    engine = Engine(run, units_of(run), mesh)
    size = run.config.train.batch_sequences
    batch = stream_of(run.config, open_source(SAMPLES), "train").batch(number * size, rows(run.plan, mesh))
    parts = microbatches_of(batch, run.plan, mesh)

    def step(record: HostRecorder | None = None) -> float:
        start_s = time.perf_counter()
        engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=1e-4, record=record)
        return time.perf_counter() - start_s

    for _ in range(WARM_UP):
        step()
    seconds, processor = [], []
    for _ in range(STEPS):
        seconds.append(step())
        processor.append(HostRecorder(time.process_time))
        step(processor[-1])
    took = [
        statistics.median(at) for at in zip(*([i.end_s - i.start_s for i in r.ran()] for r in processor), strict=True)
    ]
    machine = measure_here(
        run,
        seen,
        world,
        TimingOptions(device=Device("cpu"), budget_s=0.02, clock=time.process_time),
    )
    program = compile_step(run.plan)
    every = [list(of) for of in gather(took, list)]
    alone = [dict(zip(instructions, of, strict=True)) for instructions, of in zip(program.ranks, every, strict=True)]

    def own(i: Instruction, rank: int) -> float:
        return 0.0 if isinstance(i, Send | Recv) else alone[rank][i]

    busy = [sum(own(i, rank) for i in of) for rank, of in enumerate(program.ranks)]
    mesh.destroy()
    figures = {
        "measured_s": max(gather(statistics.median(seconds), float)),
        "processor_s": simulate(program, own).step_s,
        "slowest": max(busy) / statistics.mean(busy),
    }
    return figures, machine


def report(rounds: int, microbatches: int, file: Path) -> None:
    """Medians over the rounds of each place, a table after each round."""
    runs = {place: run_of(place, microbatches) for place in PLACES}
    seen = operations(runs["front"])
    assert seen is not None, "no unit's work depends on data"
    figures: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
    predicted: dict[str, list[float]] = {place: [] for place in PLACES}
    for number in range(rounds):
        for place, run in runs.items():
            row, machine = launch(2, measure_round, run, seen, number)
            figures[place].append(row)
            for other, its_run in runs.items():
                predicted[other].append(predict(its_run, machine, seen).step_s)
        middle = {
            place: {key: statistics.median(row[key] for row in each) for key in each[0]}
            for place, each in figures.items()
        }
        for place, row in middle.items():
            row["predicted_s"] = statistics.median(predicted[place])
        _print(number + 1, middle)
        chosen = min(("front", "spread", "bubbles"), key=lambda place: middle[place]["predicted_s"])
        gains = {
            key: middle["front"][key] / middle[chosen][key] for key in ("measured_s", "processor_s", "predicted_s")
        }
        print(f"chosen: {chosen}; front over it {', '.join(f'{k} {v:.2f}' for k, v in gains.items())}", flush=True)
        write_result(
            file, rounds=number + 1, microbatches=microbatches, load=os.getloadavg()[0], chosen=chosen, gains=gains,
            median=middle, each=figures, predictions=predicted,
        )  # fmt: skip


def _print(rounds: int, middle: dict[str, dict[str, float]]) -> None:
    print(f"{rounds} rounds{'measured':>23}{'processor':>12}{'predicted':>12}{'pred./proc.':>12}{'slowest':>9}")
    for place, row in middle.items():
        times = "".join(f"{row[key] * 1e3:>9.1f} ms" for key in SECONDS)
        print(
            f"{place:23}{times}{row['predicted_s'] / row['processor_s']:>12.2f}{row['slowest']:>8.2f}x",
            flush=True,
        )


def main() -> int:
    """Measure all places, print a table, write JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.encoder_placement", description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).parent / "results" / "encoder_placement.json",
    )
    asked = options.parse_args()
    report(asked.rounds, asked.microbatches, asked.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
