"""A second run: the same steps once more, through the training loop itself, stopped and resumed on the way.

    first run     the proof's own batches        step 0   step 1    compared with the reference, hashed
    second run    trainer, stream, prefetch     step 0   step 1    the same hashes; saved between the two
                  a new trainer, loaded                  step 1    the same hashes

Before its first step the second run validates; what it has saved is served. So the data cursor, the checkpoint, the
count of steps behind the learning rate, and what each rank consumes are in the proof.
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
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import Batch
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position
from superstep.state.tensor_piece import STATE, TensorPiece
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import evaluate, steps
from superstep.train.proof.ignored_targets import Ragged
from superstep.train.proof.sampler import PROMPTS, can_serve, find_served_fault
from superstep.train.proof.stream import plain_split
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate

Bits = dict[tuple[int, str], str]
"""Of a step and of what is named, its bits or a hash of them."""


DATA = "the batch that a rank reads"
POSITION = "the position"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartResult:
    """What a second run gave.

    Attributes:
        is_rerun_same: whether it gave the same bits; None where it was not asked.
        is_restart_same: whether the steps after a restart did; None where there was none.
        first: the first that differs, in words.
        validation: the loss on the held-out text before the first step; None where there was no training loop.
        served: what a server of the checkpoint tells otherwise than a plain decoder, in words; None where none did.
    """

    is_rerun_same: bool | None = None
    is_restart_same: bool | None = None
    first: str = ""
    validation: float | None = None
    served: str | None = None

    @property
    def is_same(self) -> bool:
        """Whether nothing differed."""
        return self.is_rerun_same is not False and self.is_restart_same is not False


def data_bits(batch: Batch) -> str:
    """A hash of what a rank consumes in a step."""
    numbers = (batch.valid_tokens, batch.divisor, sorted(batch.streams))
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=16)
    streams = (stream for _, stream in sorted(batch.streams.items()))
    for part in (batch.tokens_BS, batch.targets_BS, batch.starts_BS, *streams):
        if part is not None:
            digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def piece_bits(piece: TensorPiece) -> str:
    """What a piece is called among the bits: each of a rank's pieces is another."""
    return f"{piece.kind} of {piece.name}" + (f" from element {piece.low} on" if piece.low else "")


def hash_tensor(values: Tensor) -> str:
    """A hash of a tensor's bits."""
    return hashlib.blake2b(values.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()


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
        before: what the first run gave.
        straight: runs them as the first run did.
        corpus: the folder of token files that the batches are from; None: only ``straight`` can be run again.
    """
    if corpus is None:
        return _reran(straight(), before)
    # One folder for all ranks, which are on this host.
    folder = Path(gather(tempfile.mkdtemp(prefix="superstep-restart-") if world.rank == 0 else "")[0])
    try:
        stop = (count + 1) // 2
        found, validation = _loop(world, run, folder, corpus, range(count), stop)
        rerun = _first(_differing(found, before, _shown_steps(before, 0)))
        resumed = ""
        if not rerun and stop < count:
            found, _ = _loop(world, run, folder, corpus, range(stop, count), stop)
            resumed = _first(_differing(found, before, _shown_steps(before, stop)))
        if not rerun and not resumed:
            served = _check_served(world, run, checkpoint_at(RunFolder(root=folder).checkpoints, stop), corpus)
            restart = True if stop < count else None
            return RestartResult(is_rerun_same=True, is_restart_same=restart, validation=validation, served=served)
        # Was it a race, or does the training loop do something else than the proof's own steps?
        by_itself = _reran(straight(), before)
        if not by_itself.is_rerun_same:
            return by_itself
        first = f"in the training loop, {rerun}" if rerun else f"after the restart, {resumed}"
        return RestartResult(is_rerun_same=True, is_restart_same=False, first=first, validation=validation)
    finally:
        # Every rank has told what it found, and so has read what it needs; one that failed waits for none.
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _shown_steps(before: Bits, start: int) -> list[tuple[int, str]]:
    """What the training loop shows of the steps from there on: not the gradients."""
    return [(step, what) for step, what in before if step >= start and not what.startswith("gradient")]


def _reran(found: Bits, before: Bits) -> RestartResult:
    first = _first(_differing(found, before, before))
    return RestartResult(is_rerun_same=not first, first=first)


def _differing(found: Bits, before: Bits, wanted: Iterable[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """What differs: its step, its place in the order in which it was computed, and the two in words."""
    return [
        (key[0], place, f"step {key[0]}: {key[1]} differs")
        for place, key in enumerate(wanted)
        if found.get(key) != before[key]
    ]


def _first(mine: list[tuple[int, int, str]]) -> str:
    """The first difference of any rank, the same on every rank; nothing where none has one."""
    return min((part[0] for part in gather(mine[:1]) if part), default=(0, 0, ""))[2]


def _check_served(world: World, run: Resolved, checkpoint: Path, corpus: Path) -> str | None:
    """What rank 0's server of a checkpoint tells wrongly, on every rank; None where it cannot be asked."""
    if not can_serve(run):
        return None
    fault = ""
    if world.rank == 0:
        plain = plain_split(run.config, open_corpus(corpus), "validation")
        fault = find_served_fault(run, checkpoint, [tokens for tokens, _, _ in plain.rows(0, PROMPTS)])
    return gather(fault)[0]


def _loop(
    world: World, run: Resolved, folder: Path, corpus: Path, wanted: range, stop: int
) -> tuple[Bits, float | None]:
    """What the training loop gives for these steps: from the start, leaving a checkpoint of ``stop`` finished steps; or
    from that. And from the start, the validation loss before them.
    """
    gc.collect()  # an engine is a ring of references: else the one before it would still be held
    rate = PeakRate(flops_per_token=None, peak_flops=None)
    trainer = CorpusTrainer(world, run, RunFolder(root=folder), corpus, rate, through=Ragged)
    found: Bits = {}
    try:
        position = trainer.load(checkpoint_at(trainer.folder.checkpoints, stop)) if wanted.start else Position()
        validation = None if wanted.start else evaluate(trainer, position).loss
        seen: list[Batch] = []
        running = steps(trainer, position, seen.append)
        for step, done in zip(wanted, islice(running, len(wanted)), strict=False):
            batch, event = seen[-1], done.event
            found[step, DATA] = data_bits(batch)
            found[step, "loss"], found[step, "norm"] = repr(event.loss), repr(event.grad_norm)
            found |= {(step, piece_bits(piece)): hash_tensor(piece.values) for piece in trainer.pieces(STATE)}
            found[step, POSITION] = repr(done.position)
            if not wanted.start and step + 1 == stop:
                trainer.save(done.position)
        running.close()
    finally:
        trainer.close()
    return found, validation
