"""Batches of a recipe on samples, of training and of validation, for benches that call the engine themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from superstep.data.batch import Batch
from superstep.data.prefetch import Prefetcher
from superstep.data.sources.source import open_source, stream_of
from superstep.plan.resolution.resolve import Resolved


def read_batches(run: Resolved, rows: slice) -> Iterator[Batch]:
    """Rows of the batches of training, without an end, read ahead in the background."""
    stream = stream_of(run.config, open_source(Path(str(run.config.data.source))), "train")
    with Prefetcher(stream, start_sample=0, rows=rows, depth=run.config.data.prefetch_steps) as prefetcher:
        yield from (batch for batch, _ in prefetcher)


def read_held_out(run: Resolved, rows: slice) -> list[Batch]:
    """Rows of the whole batches of the validation, as many as the recipe reads."""
    stream = stream_of(run.config, open_source(Path(str(run.config.data.source))), "validation")
    size = run.config.train.batch_sequences
    count = max(1, min(run.config.train.eval_batches, stream.sequences // size))
    return [stream.batch(number * size, rows) for number in range(count)]
