"""Training on text by this process alone, for benches that compare the losses of many short runs."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import steps
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate


@contextmanager
def open_trainer(run: Resolved, corpus: Path) -> Iterator[CorpusTrainer]:
    """The trainer of a run of one CPU rank, whose folder is removed at the end."""
    rate = PeakRate(flops_per_token=None, peak_flops=None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = CorpusTrainer(World(0, 1, Device("cpu")), run, RunFolder(root=Path(folder)), corpus, rate)
        yield trainer
        trainer.close()


def train_to_end(trainer: CorpusTrainer, position: Position) -> Position:
    """Take all steps; where the run stands then."""
    for done in steps(trainer, position):
        position = done.position
    return position


def compare_losses(
    rows: Sequence[Mapping[str, Mapping[str, float]]], name: str, before: str
) -> dict[str, float | list[float]]:
    """The loss of a way over that of another, as a mean over the seeds with its interval of 1.96 standard errors."""
    ratios = [row[name]["loss"] / row[before]["loss"] for row in rows]
    mean = statistics.fmean(ratios)
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    interval = [] if math.isnan(half) else [round(mean - half, 5), round(mean + half, 5)]
    return {"ratio": round(mean, 5), "interval": interval}
