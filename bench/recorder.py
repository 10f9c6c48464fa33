"""What the recorder costs: steps of ranks that note every instruction in their ring, and steps of the same that do not.

    python -m bench.recorder                two ranks, a small model, steps taking turns
    python -m bench.recorder --pairs 4000

Steps with the recorder and without are done by the same ranks, taking turns. Each is held against the one beside it: by
the clock, and by what the ranks' processes had of a processor, of which a busy machine changes less. The third figure
is what the calls of a step take by themselves, over the median step.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from bench.machine import write_result
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import barrier, gather
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.launch.ranks import World, launch_apart
from superstep.model.axes import units
from superstep.monitor.status_page import HeartbeatReceiver, HeartbeatWriter, NoHeartbeats, StatusPage
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.program.instructions import Instruction

CPU = Device("cpu")

RESULT = Path(__file__).parent / "results" / "recorder.json"
RANKS = 2
WARM = 5
CALLS = 2000
VOCAB = 1024


class Switched(NoHeartbeats):
    """Beats that are now one's and now another's, at no cost of its own."""

    def turn(self, to: HeartbeatReceiver) -> None:
        """From here on they are these."""
        self.begin, self.waits, self.works, self.rests = to.begin, to.waits, to.works, to.rests  # type: ignore[method-assign]


def run_of() -> Resolved:
    """The demo's layout, ZeRO 2 over two ranks, of a smaller model: the shorter instructions are, the more of a step is
    what is noted of them.
    """
    return resolve(
        RunConfig(
            model=ModelConfig(name="demo", layers=4, width=128, heads=4, kv_heads=4, head_dim=32, ffn=256, vocab=VOCAB),
            data=DataConfig(sequence_tokens=64),
            train=TrainConfig(batch_sequences=8),
            plan=PlanConfig(dp=RANKS, zero=2, microbatch=2),
        ),
        RANKS,
    )


def _rank(world: World, run: Resolved, pairs: int) -> dict[str, Any]:
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=5))
    page, beats = StatusPage(), Switched()
    heart = HeartbeatWriter(os.dup(page.handle))
    engine = Engine(run, units(run.shape), mesh, heart=beats)
    generator = torch.Generator().manual_seed(1)
    shape = (run.config.train.batch_sequences, run.config.data.sequence_tokens)
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    mine = rows(run.plan, mesh)
    parts = microbatches(tokens[mine], tokens[mine], run.plan, mesh)
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    cpu: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(WARM + pairs):
        # Which of a pair is first changes, as what comes second may find more in the caches.
        for name in ("off", "on") if number % 2 else ("on", "off"):
            beats.turn(heart if name == "on" else NoHeartbeats())
            barrier(CPU)
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            engine.train_step(parts, valid_tokens=tokens.numel(), lr=1e-4)
            took_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            told = gather((took_s, cpu_s), tuple[float, float])
            if number >= WARM:
                seconds[name].append(max(took for took, _ in told))
                cpu[name].append(sum(each for _, each in told))
    instructions = engine.step_program.ranks[mesh.at.pp]
    call_s = _calls_s(heart, instructions) - _calls_s(NoHeartbeats(), instructions)
    calls = gather(call_s, float)
    heart.stop()
    mesh.destroy()
    return {"instructions": len(instructions), "seconds": seconds, "cpu_seconds": cpu, "calls_s": max(calls)}


def _calls_s(beats: HeartbeatReceiver, instructions: Sequence[Instruction]) -> float:
    """What the calls of one step take, the fastest of many times."""
    best = float("inf")
    for _ in range(CALLS):
        begin_s = time.perf_counter()
        beats.begin(instructions, step=1)
        for index in range(len(instructions)):
            beats.waits(index)
            beats.works(index)
        beats.rests()
        best = min(best, time.perf_counter() - begin_s)
    return best


def main() -> None:
    """Measure, write, and say it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    options = parser.parse_args()
    found: dict[str, Any] = launch_apart("cpu", RANKS, _rank, run_of(), options.pairs)
    off_s = median(found["seconds"]["off"])
    held = {"on_over_off": _held(found["seconds"]), "cpu_on_over_off": _held(found["cpu_seconds"])}
    calls = found["calls_s"] / off_s
    write_result(RESULT, ranks=RANKS, pairs=options.pairs, **held, calls_over_step=calls, step_off_s=off_s, **found)
    for name, (low, middle, high) in held.items():
        print(f"{name:18} {middle:.4f}   quartiles {low:.4f} to {high:.4f}")
    print(f"calls over a step  {calls:.4%} ({found['instructions']} instructions)")


def _held(seconds: dict[str, list[float]]) -> list[float]:
    """Each step with the recorder over the one beside it without: the first quartile, the median, the third."""
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return quantiles(ratios, n=4)


if __name__ == "__main__":
    main()
