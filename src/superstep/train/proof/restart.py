"""A second run: the same steps again, through the training loop itself, stopped and resumed on the way.

    first run     the proof's own batches        step 0   step 1    compared with the reference, hashed
    second run    trainer, stream, prefetch     step 0   step 1    the same hashes; saved between the two
                  a new trainer, loaded                  step 1    the same hashes

Before its first step the second run validates; its checkpoint is served. So the proof covers the data cursor, the
checkpoint, the step count of the learning rate, and the batches of each rank.
"""

from __future__ import annotations

import gc
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor

from superstep.comm.objects import gather
from superstep.data.batch import Batch
from superstep.data.token_files import open_corpus
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position
from superstep.state.tensor_piece import TensorPiece
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import evaluate, steps
from superstep.train.proof.ignored_targets import Ragged
from superstep.train.proof.plain.plain_stream import PlainSplit
from superstep.train.proof.sampler import PROMPTS, can_serve, find_served_fault
from superstep.train.proof.stream import plain_split
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate

Bits = dict[tuple[int, str], str]
"""Bits or hashes by step and name."""


DATA = "the batch that a rank reads"
POSITION = "the position"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartResult:
    """Results of a second run.

    Attributes:
        is_rerun_same: whether it gave the same bits; None if not checked.
        is_restart_same: whether the steps after a restart did; None without one.
        first: the first difference, in words.
        validation: the loss on the held-out text before the first step; None without a training loop.
        served: a difference between a server of the checkpoint and a plain decoder, in words; None if not checked.
    """

    is_rerun_same: bool | None = None
    is_restart_same: bool | None = None
    first: str = ""
    validation: float | None = None
    served: str | None = None

    @property
    def is_same(self) -> bool:
        return self.is_rerun_same is not False and self.is_restart_same is not False


def data_bits(batch: Batch) -> str:
    """A hash of a rank's batch."""
    numbers = (batch.valid_tokens, batch.divisor, sorted(batch.streams), sorted(batch.fields), batch.reads)
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=16)
    named = (values for by_name in (batch.fields, batch.streams) for _, values in sorted(by_name.items()))
    for part in (batch.targets_BS, batch.starts_BS, *named):
        if part is not None:
            digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def piece_bits(piece: TensorPiece) -> str:
    """A name of a piece among the bits, unique on its rank."""
    return f"{piece.kind} of {piece.name}" + (f" from element {piece.low} on" if piece.low else "")


def hash_tensor(values: Tensor) -> str:
    """A hash of a tensor's bits."""
    return hashlib.blake2b(values.detach().cpu().float().contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def go_again(
    world: World,
    run: Resolved,
    count: int,
    before: Bits,
    straight: Callable[[], Bits],
    corpus: Path | None,
) -> RestartResult:
    """Run ``count`` steps again and compare their bits with ``before``. Every rank calls this together.

    Args:
        world: the launched ranks.
        run: the resolved run.
        count: steps.
        before: bits of the first run.
        straight: runs them as the first run did.
        corpus: the folder of token files of the batches; None: only ``straight`` can run again.
    """
    if corpus is None:
        return _reran(straight(), before)
    # One folder for all ranks, which are on this host.
    folder = Path(gather(tempfile.mkdtemp(prefix="superstep-restart-") if world.rank == 0 else "", str)[0])
    try:
        stop = (count + 1) // 2
        bits, validation = _loop(world, run, folder, corpus, range(count), stop)
        rerun = _first(_differing(bits, before, _list_shown_steps(before, 0)))
        resumed = ""
        if not rerun and stop < count:
            bits, _ = _loop(world, run, folder, corpus, range(stop, count), stop)
            resumed = _first(_differing(bits, before, _list_shown_steps(before, stop)))
        if not rerun and not resumed:
            served = _check_served(world, run, checkpoint_at(RunFolder(root=folder).checkpoints, stop), corpus)
            restart = True if stop < count else None
            return RestartResult(is_rerun_same=True, is_restart_same=restart, validation=validation, served=served)
        # Distinguish a race from a difference between the training loop and the proof's own steps.
        by_itself = _reran(straight(), before)
        if not by_itself.is_rerun_same:
            return by_itself
        first = f"in the training loop, {rerun}" if rerun else f"after the restart, {resumed}"
        return RestartResult(is_rerun_same=True, is_restart_same=False, first=first, validation=validation)
    finally:
        # All ranks have reported and need no files any more; a failed rank is not waited for.
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _list_shown_steps(before: Bits, start: int) -> list[tuple[int, str]]:
    """Bits that the training loop shows from step ``start`` on: no gradients."""
    return [(step, what) for step, what in before if step >= start and not what.startswith("gradient")]


def _reran(bits: Bits, before: Bits) -> RestartResult:
    first = _first(_differing(bits, before, before))
    return RestartResult(is_rerun_same=not first, first=first)


def _differing(bits: Bits, before: Bits, wanted: Iterable[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Differences: the step, the place in the order of computation, and a text."""
    return [
        (key[0], place, f"step {key[0]}: {key[1]} differs")
        for place, key in enumerate(wanted)
        if bits.get(key) != before[key]
    ]


def _first(mine: list[tuple[int, int, str]]) -> str:
    """The first difference of any rank, the same on every rank; empty without one."""
    return min((part[0] for part in gather(mine[:1], list[tuple[int, int, str]]) if part), default=(0, 0, ""))[2]


def _check_served(world: World, run: Resolved, checkpoint: Path, corpus: Path) -> str | None:
    """A fault of rank 0's server of a checkpoint, on every rank; None if the run cannot be served."""
    if not can_serve(run):
        return None
    fault = ""
    if world.rank == 0:
        plain = plain_split(run.config, open_corpus(corpus), "validation")
        assert isinstance(plain, PlainSplit), "only the decoder is served"
        fault = find_served_fault(run, checkpoint, [tokens for tokens, _, _ in plain.rows(0, PROMPTS)])
    return gather(fault, str)[0]


def _loop(
    world: World, run: Resolved, folder: Path, corpus: Path, wanted: range, stop: int
) -> tuple[Bits, float | None]:
    """Bits of the training loop for these steps: from the start, with a checkpoint after ``stop`` steps; or from that.
    And from the start, the validation loss before them.
    """
    gc.collect()  # an engine has reference cycles: otherwise the earlier one would stay in memory
    rate = PeakRate(flops_per_token=None, peak_flops=None)
    trainer = CorpusTrainer(world, run, RunFolder(root=folder), corpus, rate, through=Ragged)
    bits: Bits = {}
    try:
        position = trainer.load(checkpoint_at(trainer.folder.checkpoints, stop)) if wanted.start else Position()
        validation = None if wanted.start else evaluate(trainer, position).loss
        batches: list[Batch] = []
        running = steps(trainer, position, batches.append)
        for step, done in zip(wanted, islice(running, len(wanted)), strict=False):
            batch, event = batches[-1], done.event
            bits[step, DATA] = data_bits(batch)
            bits[step, "loss"], bits[step, "norm"] = repr(event.loss), repr(event.grad_norm)
            bits |= {(step, piece_bits(piece)): hash_tensor(piece.values) for piece in trainer.pieces()}
            bits[step, POSITION] = repr(done.position)
            if not wanted.start and step + 1 == stop:
                trainer.save(done.position)
        running.close()
    finally:
        trainer.close()
    return bits, validation
