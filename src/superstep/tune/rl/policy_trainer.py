"""The trainer of an iteration, on one rank: batches of rollouts, a reference, and versions of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from superstep.data.batch import Batch
from superstep.engine.engine import Engine, StepResult
from superstep.engine.flat.offload import OffloadedBuffers
from superstep.engine.values.microbatch import microbatches_of
from superstep.launch.ranks import World
from superstep.model.unit import mark_frozen
from superstep.numerics.objective import CROSS_ENTROPY, Objective
from superstep.numerics.sequence_losses import SequenceLossResult
from superstep.plan.resolution.resolve import Resolved
from superstep.state.load_weights import fill
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import SnapshotMemory
from superstep.train.open_engine import open_engine
from superstep.train.run_folder.identity import identity_of
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.trainer import Trainer
from superstep.train.weights.checkpoint_files import files_beside_start
from superstep.train.weights.model import model_alone, shapes_of, units_of
from superstep.tune.rl.job import RlJob

KEEP_ALL = 1 << 30
"""Published versions that stay: only the program retires them."""


class LogProbDiffers(Exception):
    """A log-probability differs from the known one."""


class PolicyTrainer(Trainer):
    """The trainer of shared or separate ranks.

    Args:
        world: the launched ranks.
        run: the resolved run.
        folder: the run directory.
        files: texts of a checkpoint and of a snapshot; rank 0's count.
        temperature: of sampling; it also divides the logits of the trainer and of the reference.

    Attributes:
        position: of training.
    """

    def __init__(
        self, world: World, run: Resolved, folder: RunFolder, files: Mapping[str, str], *, temperature: float = 1.0
    ) -> None:
        engine = open_engine(world, run, temperature=temperature)
        super().__init__(world, run, engine, folder=folder, identity=identity_of(run), files=files)
        self.position = Position()
        self._temperature = temperature
        self._asleep: list[OffloadedBuffers] = []
        self._reference: Engine | None = None

    def start(
        self,
        checkpoint: Path | None,
        start: Path | None,
        memory: SnapshotMemory | None = None,
        recovered: int | None = None,
        epoch: int = 0,
    ) -> None:
        """Resume from a checkpoint, or start with the weights of a folder, with adapters on top.

        Args:
            checkpoint: None at the run's beginning.
            start: the folder of the initial weights.
            memory: for snapshots of this rank's state; None keeps none.
            recovered: the step of the snapshot to resume from; None: from the checkpoint.
            epoch: as ``keep_snapshots``.
        """
        if checkpoint is None:
            self.begin(start)
        else:
            self.position = self.load(checkpoint)
        if memory is not None:
            self.position = self.keep_snapshots(memory, recovered, epoch=epoch) or self.position
        self.recall(self.position)
        self.policy.integrity.begin(self.position.step)
        if self.peers.rank == 0:
            self.describe()

    def keep_reference(self, start: Path) -> None:
        """Keep the weights of a folder as a reference beside the trained ones. Adapters leave the base unchanged: then
        both share its memory, where each rank has it whole.
        """
        run = model_alone(self.run)
        units = mark_frozen(units_of(run), self.run.outline)  # as the base beside adapters
        self._reference = Engine(run, units, self._mesh, learns=False, heart=self.heart, temperature=self._temperature)
        if self.run.config.lora is not None and not self._reference.is_cut:
            self._reference.share_frozen(self._engine)
        else:
            fill(start, self._reference.frozen_pieces(), shapes_of(run), self.peers)
        self._reference.note_loaded(0)

    def reference(self, batch: Batch) -> Tensor:
        """``logprobs_of`` with the reference weights."""
        assert self._reference is not None, "a reference was asked for"
        return self._reference.logprobs(microbatches_of(self._mine(batch), self.run.plan, self._mesh)).cpu()

    def logprobs_of(self, batch: Batch) -> Tensor:
        """The log-probability of each target of a global batch, with the current weights: fp32 [B, S], whole."""
        return self.logprobs(self._mine(batch)).cpu()

    @property
    def multiple(self) -> int:
        """The rows of a global batch are a multiple of this: each place has whole microbatches, and with several stages
        a multiple of the plan's number.
        """
        plan = self.run.plan
        each = plan.microbatch * (1 if plan.mesh.pp == 1 else plan.microbatches)
        return plan.mesh.dp * each

    def _rows_of(self, batch: Batch, place: int) -> Batch:
        """The rows of a global batch of a data-parallel place."""
        count = len(batch.tokens_BS) // self.run.plan.mesh.dp
        return batch.rows(slice(place * count, (place + 1) * count))

    def _mine(self, batch: Batch) -> Batch:
        return self._rows_of(batch, self._mesh.at.dp)

    def step(
        self,
        batch: Batch,
        objective: Objective = CROSS_ENTROPY,
        *,
        is_checked: bool = False,
        weighed: SequenceLossResult | None = None,
    ) -> StepResult:
        """One step on a global batch.

        Args:
            batch: whole; each rank takes its rows.
            objective: of its streams.
            is_checked: whether each log-probability must equal the known one, bit for bit.
            weighed: the loss of whole answers, if the batch's weights come from it.

        Raises:
            Differs: one does not. The weights are unchanged.
            Fault: the loss or the gradient's norm is not finite.
        """
        step = self.position.step + 1

        def inspect() -> None:
            if is_checked and self._engine.measures["max_dlogp"] != 0.0:
                raise LogProbDiffers

        result = self.take_step(
            self._mine(batch),
            self.learning_rate(self.position.step),
            step=step,
            objective=objective,
            weighed=weighed,
            inspect=inspect,
            rows_of=partial(self._rows_of, batch),
        )
        if result.refused:
            return result
        self.require_finite(result, step)
        cursor = self.position.samples + len(batch.tokens_BS)
        self.position = self.advance(self.position, samples=cursor, tokens=result.tokens)
        return result

    def weights(self) -> dict[str, Tensor] | None:
        """The whole trained weights by name, sharing memory. None where this rank has a part of them or frees its
        memory for sampling; and for adapters, which are passed in a folder.
        """
        if self._device.kind != "cpu" or self.run.config.lora is not None:
            return None
        pieces = list(self.pieces(("weight",)))
        if {piece.name for piece in pieces} != self._tensors["weight"].keys():
            return None
        if any(piece.values.numel() != math.prod(piece.shape) for piece in pieces):
            return None
        return {piece.name: piece.values.view(piece.shape) for piece in pieces}

    def publish_version(self, version: int, root: Path) -> Path:
        """Write the weights of this version as a snapshot. Every rank calls this together."""
        assert version == self.position.step, "the program says when"
        return self.publish(root, self.position, keep=KEEP_ALL).path

    def sleep(self) -> None:
        """Free the memory of training while shared ranks sample; not on a CPU, where it would only move
        within memory.
        """
        if self._device.kind != "cpu":
            self._asleep = [engine.sleep() for engine in (self._engine, self._reference) if engine is not None]

    def wake(self) -> None:
        """Allocate and restore it."""
        for held in self._asleep:
            held.wake()
        self._asleep = []


def start_trainer(world: World, job: RlJob) -> PolicyTrainer:
    """The trainer of a training rank, at the place in the run where the job begins."""
    texts = files_beside_start(job.run, job.start) if world.rank == 0 else {}
    trainer = PolicyTrainer(world, job.run, job.folder, texts, temperature=job.rollout.temperature)
    trainer.start(job.checkpoint, job.start, job.memory(world.rank), job.recovered, job.epoch)
    if job.rl.kl_coef:
        trainer.keep_reference(job.start)
    return trainer
