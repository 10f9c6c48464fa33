"""Activations on a disk: the time of a step beside others, and a model that a limit of memory refuses.

    python -m bench.memory --out bench/results/memory.json

Two engines of one process, alike but for ``plan.activations``, take turns step by step. Then a process of each trains
under the same limit of its data segment (RLIMIT_DATA), halfway between what the two are predicted to need.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

from bench.machine import write_result
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.time.predict import predict
from superstep.data.batch import Batch
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.measure.disk import direct_rates
from superstep.engine.measure.probe_machine import measure
from superstep.engine.values.microbatch import microbatches_of
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, Place, PlanConfig, RunConfig, StateConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.train.weights.model import operations

PLACES: tuple[Place, ...] = ("device", "disk")
MIB = 2**20


@dataclass(frozen=True)
class Options:
    """The model and how long it is measured."""

    layers: int
    width: int
    tokens: int
    rows: int
    steps: int
    folder: Path


def run_of(options: Options, place: Place) -> Resolved:
    heads = options.width // 64
    model = ModelConfig(
        layers=options.layers,
        width=options.width,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        ffn=3 * options.width,
        vocab=512,
    )
    config = RunConfig(
        model=model,
        data=DataConfig(sequence_tokens=options.tokens),
        train=TrainConfig(batch_sequences=options.rows),
        plan=PlanConfig(dp=1, microbatch=options.rows, activations=(place,)),
        state=StateConfig(dir=str(options.folder)),
    )
    return with_kept(resolve(config), Device("cpu"))


class Side:
    """An engine, and the batch that it trains on."""

    def __init__(self, run: Resolved) -> None:
        self.run = run
        mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
        self.engine = Engine(run, units(run.shape), mesh)
        shape = run.config.train.batch_sequences, run.config.data.sequence_tokens
        tokens = torch.randint(0, 512, shape, generator=torch.Generator().manual_seed(0))
        batch = Batch({"tokens": tokens}, tokens.roll(-1, 1).contiguous(), tokens.numel(), None)
        self.microbatches = microbatches_of(batch, run.plan, mesh)

    def step(self) -> tuple[float, float]:
        """Seconds and loss of one step."""
        start_s = time.perf_counter()
        result = self.engine.train_step(self.microbatches, valid_tokens=self.microbatches[0].targets.numel(), lr=1e-3)
        return time.perf_counter() - start_s, result.loss


def interleave(options: Options) -> dict[str, object]:
    """Steps in turn: medians, and whether the losses have the same bits."""
    sides = {place: Side(run_of(options, place)) for place in PLACES}
    for side in sides.values():
        side.step()
    steps: dict[Place, list[tuple[float, float]]] = {place: [] for place in PLACES}
    for _ in range(options.steps):
        for place, side in sides.items():
            steps[place].append(side.step())
    medians = {place: median(s for s, _ in steps[place]) for place in PLACES}
    alike = [loss for _, loss in steps["device"]] == [loss for _, loss in steps["disk"]]
    return {"step_s": medians, "ratio": medians["disk"] / medians["device"], "losses_have_the_same_bits": alike}


def predict_step(options: Options, place: Place) -> dict[str, float]:
    """Predicted seconds of a step, and bytes that exist within it alone."""
    run = run_of(options, place)
    traced = operations(run)
    assert traced is not None
    prediction = predict(run, measure(run, Device("cpu"), traced), traced)
    return {"step_s": prediction.step_s, "transient_bytes": prediction.memory[0].peak.bytes}


def train_under_limit(options: Options, place: Place, room: int) -> int:
    """Three steps with ``room`` more bytes of data segment than the engine has before them; 3 where it is refused."""
    side = Side(run_of(options, place))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + room, held + room))
    try:
        losses = [side.step()[1] for _ in range(3)]
    except (MemoryError, RuntimeError) as error:
        print(f"refused: {str(error).splitlines()[0]}")
        return 3
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"trained: losses {losses}, at most {resident} MiB resident")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 12), ("width", 256), ("tokens", 256), ("rows", 8), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="on a disk; none makes one here")
    parser.add_argument("--under", choices=PLACES, help="train under a limit, and nothing else")
    parser.add_argument("--room", type=int, default=0, help="MiB of that limit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
        sizes = {name: getattr(args, name) for name in ("layers", "width", "tokens", "rows", "steps")}
        options = Options(**sizes, folder=args.folder or Path(made))
        if args.under:
            return train_under_limit(options, args.under, args.room * MIB)
        read, write = direct_rates(options.folder)
        predicted = {place: predict_step(options, place) for place in PLACES}
        room = int(sum(each["transient_bytes"] for each in predicted.values()) / 2 / MIB)
        words = [f"--{name}={size}" for name, size in sizes.items()]
        under = {}
        for place in PLACES:
            command = [sys.executable, "-m", "bench.memory", f"--under={place}", f"--room={room}", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            under[place] = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
        figures = {
            "model": sizes,
            "disk_bytes_per_s": {"read": read, "write": write},
            "predicted": predicted,
            "measured": interleave(options),
            "limit_mib": room,
            "under_limit": under,
        }
        for name, figure in figures.items():
            print(f"{name}: {figure}")
        if args.out:
            write_result(args.out, **figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
