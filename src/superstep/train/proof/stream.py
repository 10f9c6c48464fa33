"""prove: the stream of a run and the place of its random numbers against plain code, on each rank, independent of the
proof's own batches.

    cursor 0, the batch behind it, the batch in which an epoch ends      training: packed, masked, padded
    cursor 0, the batch behind it                                        validation: the same

All three kinds of rows are read from the run's token files, whichever the run uses. Samples of a user's file have one
kind of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from superstep.comm.mesh import Mesh
from superstep.data.batch import SPLITS, Batch, SplitName
from superstep.data.samples.sample_file import SampleFile
from superstep.data.sources.source import Source, open_source, stream_of
from superstep.data.token_files import Corpus
from superstep.engine.parallel.noise import find_place
from superstep.engine.values.microbatch import microbatches, rows
from superstep.numerics.loss import IGNORE
from superstep.numerics.noise import SamplePlace
from superstep.plan.config import RunConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.train.proof.plain.plain_rows import rows_fault
from superstep.train.proof.plain.plain_samples import PlainSamples, sample_fault
from superstep.train.proof.plain.plain_stream import PlainSplit, Row
from superstep.train.weights.model import units_of

KINDS = {"packed": (True, False), "masked": (True, True), "padded": (False, False)}
"""Kinds of rows: ``data.packed`` and ``data.document_mask``."""

STEP = 5
"""The step at which the places of random numbers are compared; any would do."""


def plain_split(config: RunConfig, source: Source, split: SplitName) -> PlainSplit | PlainSamples:
    """A split of the data in plain code."""
    if isinstance(source, Corpus):
        return _plain_tokens(config, source, split)
    return PlainSamples(samples=source, split=split, seed=config.train.seed)


def _plain_tokens(config: RunConfig, corpus: Corpus, split: SplitName) -> PlainSplit:
    return PlainSplit(
        split=corpus.train if split == "train" else corpus.validation,
        data=config.data,
        padding=corpus.manifest.end_of_text,
        seed=config.train.seed if split == "train" else None,
    )


def stream_fault(run: Resolved, mesh: Mesh, folder: Path) -> str:
    """A difference between this rank's rows and plain code, in words; empty without one."""
    corpus, place, mine = open_source(folder), run.plan.mesh.at(mesh.rank).dp, rows(run.plan, mesh)
    if not isinstance(corpus, Corpus):
        return _samples_fault(run.config, corpus, mine, mesh.rank)
    for split in SPLITS:
        for kind, (is_packed, is_masked) in KINDS.items():
            data = replace(run.config.data, packed=is_packed, document_mask=is_masked)
            config = replace(run.config, data=data)
            plain = _plain_tokens(config, corpus, split)
            if not plain.count:
                continue
            size = config.train.batch_sequences
            share = size // run.plan.mesh.dp
            stream = stream_of(config, corpus, split)
            for sample in _samples(plain.count, size, is_shuffled=split == "train"):
                wanted = plain.rows(sample, size)
                fault = next(_faults(stream.batch(sample, mine), wanted, place * share, share), "")
                if fault:
                    return f"the {split} stream, {kind}: the batch at sample {sample}: rank {mesh.rank}: {fault}"
    return ""


def encoder_fault(run: Resolved, mesh: Mesh, folder: Path) -> str:
    """A rank's encoder with rows at other tokens than its own, in words; empty without one."""
    if run.samples is None:
        return ""
    batch = stream_of(run.config, open_source(folder), "train").batch(0, rows(run.plan, mesh))
    fault = rows_fault(units_of(run), run.samples, batch)
    return fault and f"rank {mesh.rank}: {fault}"


def _samples_fault(config: RunConfig, samples: SampleFile, mine: slice, rank: int) -> str:
    for split in SPLITS:
        plain, stream = (
            PlainSamples(samples=samples, split=split, seed=config.train.seed),
            stream_of(config, samples, split),
        )
        size = config.train.batch_sequences
        for sample in _samples(plain.count, size, is_shuffled=split == "train"):
            fault = sample_fault(stream.batch(sample, mine), plain.batch(sample, size), mine)
            if fault:
                return f"the {split} stream: the batch at sample {sample}: rank {rank}: {fault}"
    return ""


def noise_fault(run: Resolved, mesh: Mesh) -> str:
    """A difference between the place of this rank's random numbers and plain code, in words; empty without one."""
    plan, mine = run.plan, rows(run.plan, mesh)
    tokens = torch.zeros(mine.stop - mine.start, run.config.data.sequence_tokens, dtype=torch.long)
    for m, microbatch in enumerate(microbatches(tokens, tokens, plan, mesh)):
        place = find_place(run, mesh, STEP, plan.microbatches, microbatch.first)
        wanted = SamplePlace(
            seed=run.config.train.seed,
            step=STEP,
            sample=mine.start + m * plan.microbatch,
            is_training=True,
        )
        for name in ("seed", "step", "sample", "is_training"):
            ours, plain = getattr(place, name), getattr(wanted, name)
            if ours != plain:
                return f"random numbers of rank {mesh.rank}, microbatch {m}: the {name} is {ours}, not {plain}"
    return ""


def _samples(count: int, size: int, *, is_shuffled: bool) -> list[int]:
    """Cursors of the checked batches."""
    return [0, size, *([max(0, count - size // 2)] if is_shuffled else ())]


def _faults(batch: Batch, wanted: list[Row], first: int, share: int) -> Iterator[str]:
    """Faults in a rank's rows of a batch.

    Args:
        batch: the rows.
        wanted: those of the whole batch.
        first: the number of this rank's first row.
        share: its number of rows.
    """
    counted = sum(target != IGNORE for _, targets, _ in wanted for target in targets)
    if batch.valid_tokens != counted:
        yield f"{batch.valid_tokens} valid tokens are counted, and {counted} targets have a loss"
    if len(batch.tokens_BS) != share:
        yield f"{len(batch.tokens_BS)} rows are read, and {share} are its own"
    for row, (tokens, targets, starts) in enumerate(wanted[first : first + share]):
        for name, ours, plain in (
            ("token", batch.tokens_BS, tokens),
            ("target", batch.targets_BS, targets),
            ("start of the document", batch.starts_BS, starts),
        ):
            if ours is None:
                continue
            at = next((n for n, (a, b) in enumerate(zip(ours[row].tolist(), plain, strict=True)) if a != b), None)
            if at is not None:
                difference = f"the {name} of place {at} is {int(ours[row, at])}, not {plain[at]}"
                yield f"row {first + row} of the batch: {difference}"
