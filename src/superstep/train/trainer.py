"""The trainer: one rank's engine, the policy of a step, state on disk and in memory, weights for servers.

    pretraining, sft, dpo     CorpusTrainer    batches of a corpus, validation
    rewards                   PolicyTrainer    batches of rollouts, a reference, versions of the weights
    Tinker                    AdapterTrainer   gradients and updates on a client's request

They differ in the source of batches and in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from superstep.comm.mesh import Mesh, build_mesh
from superstep.comm.objects import RankPeers
from superstep.data.token_stream import Batch
from superstep.engine.engine import Engine, StepResult
from superstep.engine.flat.offload import OffloadedBuffers
from superstep.engine.instruction_timer import HostRecorder, Recorder
from superstep.engine.microbatch import microbatches_of
from superstep.errors import DamagedCheckpoint, Fault, StateError
from superstep.launch.ranks import World
from superstep.numerics.objective import Objective
from superstep.numerics.sequence_losses import SequenceLossResult
from superstep.observe.jsonl import read
from superstep.plan.resolution.resolve import Resolved
from superstep.program.text import describe, write_program
from superstep.serve.files.weights import KEEP, PublishedWeights
from superstep.state.all_or_none import together
from superstep.state.checkpoint import load, save
from superstep.state.checkpoint_dirs import checkpoint_at, checkpoints, step_of
from superstep.state.load_weights import fill
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import HOSTS_SLOTS, SLOTS, SnapshotMemory, damaged_text
from superstep.state.tensor_piece import Kind, TensorPiece, Tensors
from superstep.state.verify import drop_old, is_there, verify_weights
from superstep.train.lr_schedule import rate
from superstep.train.policy.corruption_check import ranks_text
from superstep.train.policy.gradient_recheck import RowsOf
from superstep.train.policy.step_policy import StepPolicy
from superstep.train.run_folder.after_checkpoint import WrittenCheckpoint
from superstep.train.run_folder.folder_watch import FolderWatch, RunFolderMoved, follow
from superstep.train.run_folder.identity import require_same_run
from superstep.train.run_folder.run_paths import RunFolder, write_whole
from superstep.train.save_schedule import SaveSchedule
from superstep.train.snapshot_schedule import SnapshotSchedule
from superstep.train.weights.base_file import BaseWeights
from superstep.train.weights.lora_base import begin_base, files_of, resume_base
from superstep.train.weights.model import tensor_shapes, units_of
from superstep.train.weights.publish_weights import publish
from superstep.train.weights.weights_folder import weights_of

MESH_TIMEOUT = timedelta(minutes=10)


def open_mesh(world: World, run: Resolved) -> Mesh:
    """The process groups of a run's ranks. Every rank calls this together."""
    return build_mesh(run.plan, world.rank, world.device, timeout=MESH_TIMEOUT)


def open_engine(world: World, run: Resolved, *, temperature: float = 1.0) -> Engine:
    """The engine of a run on this rank. Every rank calls this together."""
    return Engine(run, units_of(run), open_mesh(world, run), heart=world.heart, temperature=temperature)


class Trainer:
    """One rank's part of a trained model.

    Args:
        world: the launched ranks.
        run: the resolved run.
        engine: of this rank.
        folder: the run directory.
        identity: of the run, for checkpoints.
        files: texts of a checkpoint and of published weights, by name; rank 0's count.

    Attributes:
        peers: the ranks.
        policy: checks of a step.
        copies: snapshots in memory that outlives this rank, if any.
        saves: the schedule of checkpoints.
        watch: of the run directory; None but on rank 0.
    """

    def __init__(
        self,
        world: World,
        run: Resolved,
        engine: Engine,
        *,
        folder: RunFolder,
        identity: Mapping[str, str],
        files: Mapping[str, str],
    ) -> None:
        self.run = run
        self.folder = self._began_in = folder
        self.heart = world.heart
        self.peers = RankPeers(world.rank, world.size)
        self.policy = StepPolicy(run, engine, self.peers)
        self.copies = SnapshotSchedule(run.config.state.snapshot_every)
        self.saves = SaveSchedule(run.config.state.save_every, run.config.state.save_patience)
        self.watch: FolderWatch | None = None
        self._device = world.device
        self._stop = world.stop
        self._engine = engine
        self._mesh = engine.mesh
        self._shapes = tensor_shapes(engine)
        self._identity = identity
        self._files = dict(files)
        self._record: Recorder = HostRecorder()

    @property
    def unpinned(self) -> str:
        """Why a GPU cannot copy directly into snapshot memory; empty where it can, or without snapshots."""
        return "" if self.copies.snapshots is None else self.copies.snapshots.unpinned

    @property
    def layers(self) -> str:
        """Implementations of this rank's layers."""
        return self._engine.layers

    def describe(self) -> None:
        """Write the program into the run directory."""
        write_whole(self.folder.program, write_program(self._engine.step_program))

    def begin(self, folder: Path | None) -> None:
        """Start with the weights of a folder, or of a run's newest checkpoint, if given. Adapters are trained on top of
        them. Every rank calls this together.

        Raises:
            StateError: the weights are missing, or belong to another model.
        """
        if folder is None:
            return

        def unreadable(error: Exception) -> StateError:
            return StateError(f"model.weights = '{folder}' cannot be read ({error}).")

        def find() -> Path | None:
            return None if self.peers.rank else weights_of(folder)

        # One rank decides: another run may be writing the next checkpoint.
        weights = together(self.peers, find, unreadable, Path | None)[0]
        assert weights is not None
        verify_weights(weights, self.peers)
        if self.run.config.lora is not None:
            self._train_beside(begin_base(self.run, self._engine, self.peers, weights))
        else:
            fill(weights, self._engine.pieces(("weight",)), self._shapes, self.peers)
        self._engine.note_loaded(0)

    def _train_beside(self, base: BaseWeights) -> None:
        """Record the base weights of adapters."""
        if self.peers.rank == 0:
            self._files |= files_of(self.run, base)

    def load(self, checkpoint: Path) -> Position:
        """Resume from a checkpoint; adapters also need their base weights."""
        require_same_run(checkpoint, self._identity)
        position = self.read(checkpoint)
        if self.run.config.lora is not None:
            self._train_beside(resume_base(self.run, self._engine, self.peers, checkpoint))
        return position

    def read(self, place: Path, kinds: Sequence[Kind] | None = None) -> Position:
        """Read the state, or some kinds of it, from a checkpoint. Every rank calls this together.

        Raises:
            StateError: it is damaged, or belongs to another model: on every rank the same. Nothing has changed.
        """
        self.policy.integrity.forget()
        position = load(place, self._engine.pieces(kinds), self.peers)
        self._engine.note_loaded(position.step)
        return position

    def write(self, place: Path, position: Position) -> int:
        """Write the state as a checkpoint; its bytes. Every rank calls this together.

        Raises:
            DiskFault: the disk does not take it: on every rank the same.
        """
        return save(place, self._engine.pieces(), position, self.peers, tensors=self._tensors, beside=self._files)

    @property
    def _tensors(self) -> Tensors:
        """What a checkpoint has."""
        return dict.fromkeys(self._engine.state_kinds, self._shapes)

    def keep_snapshots(self, memory: SnapshotMemory, recovered: int | None, *, epoch: int = 0) -> Position | None:
        """Start to copy the state into memory that outlives this rank.

        Args:
            memory: of this rank.
            recovered: the step in it to resume from, if any.
            epoch: number of starts by launchers of several hosts: none of them has all memories, and ranks write
                checkpoints. 0 with one launcher.

        Returns:
            The resumed position, if any.
        """
        self.copies.snapshots = snapshots = self._engine.keep_snapshots(memory)
        self.copies.is_flushed = epoch == 0
        snapshots.turn = epoch << 32
        slots = HOSTS_SLOTS if epoch else SLOTS
        if recovered is None:
            snapshots.lay_out(self._engine.pieces(), self._tensors, self._files, self.folder.checkpoints, slots)
            return None
        position = snapshots.restore(recovered)
        self._engine.note_loaded(position.step)
        return position

    def restore(self, step: int) -> Position:
        """Restore a complete state from memory, on every rank. Every rank calls this together.

        Raises:
            Damaged: a rank's copy has other bits than were copied; on every rank the same, before anything is changed.
        """
        assert self.copies.snapshots is not None
        is_damaged = self.peers.gather(self.copies.snapshots.is_damaged(step), bool)
        if any(is_damaged):
            raise DamagedCheckpoint(
                f"{ranks_text([r for r, each in enumerate(is_damaged) if each])}: {damaged_text(step)}"
            )
        self.policy.integrity.forget()
        position = self.copies.snapshots.fill(step)
        self._engine.note_loaded(step)
        return position

    def recall(self, position: Position) -> None:
        """Restore the run's history from its metrics and checkpoints. Every rank calls this together."""
        spikes = self.policy.spikes
        known = list(read(self.folder.metrics)) if not self.peers.rank and self.folder.metrics.exists() else []
        taken = [line for line in known if line.get("event") == "step" and line["step"] <= position.step]
        wanted = [line for line in known if line.get("event") == "rolled_back"] + taken[-spikes.window_steps :]
        saved = [] if self.peers.rank else checkpoints(self.folder.checkpoints)
        mine = wanted, step_of(saved[-1]) if saved else 0
        lines, newest = self.peers.gather(mine, tuple[list[dict[str, Any]], int])[0]
        spikes.recall(lines, position.step)
        self.saves.note_saved(newest)

    def pieces(self, kinds: Sequence[Kind] | None = None) -> Iterator[TensorPiece]:
        """This rank's pieces of the state."""
        return self._engine.pieces(kinds)

    def learning_rate(self, step: int) -> float:
        """The rate of the update after ``step`` finished steps."""
        return rate(self.run.config.train, step)

    def is_saved(self, step: int) -> bool:
        """Whether a checkpoint follows the step."""
        return self.saves.is_due(step) or step == self.run.config.train.steps

    def take_step(
        self,
        batch: Batch,
        lr: float,
        *,
        step: int,
        objective: Objective | None = None,
        weighed: SequenceLossResult | None = None,
        inspect: Callable[[], None] | None = None,
        rows_of: RowsOf | None = None,
    ) -> StepResult:
        """One training step, the ``step``-th. Every rank calls this together.

        Args:
            batch: the rows of this rank.
            lr: the learning rate.
            step: its number.
            objective: of the batch's streams; None means the loss of ``train.loss``.
            weighed: the loss of whole sequences, if the batch's weights come from it.
            inspect: called when the gradients are final, before the update.
            rows_of: the rows of any data-parallel place, for the recheck of the gradient.

        Raises:
            Fault: an error of torch, with its instruction; or the policy rejects the step, and there are no rules for a
                rollback.
        """
        divisor = batch.divisor or batch.valid_tokens
        loss = None if weighed is None else weighed.loss / divisor
        try:
            judge = self.policy.judge_of(
                step, is_saved=self.is_saved(step), loss=loss, rows_of=rows_of, objective=objective
            )
            with self._recording(step) as record:
                result = self._engine.train_step(
                    microbatches_of(batch, self.run.plan, self._mesh),
                    valid_tokens=batch.valid_tokens,
                    divisor=batch.divisor,
                    lr=lr,
                    objective=objective,
                    inspect=inspect,
                    judge=judge,
                    record=record,
                    stop=self._stop,
                )
            self.policy.explain(result, step, rows_of, objective)
        except RuntimeError as error:
            raise self._fault(error, step) from error
        if weighed is None or loss is None:
            return result
        return replace(result, loss=loss, measures={**result.measures, **weighed.measures})

    @contextmanager
    def _recording(self, step: int) -> Iterator[Recorder]:
        """Record the time of each instruction of a step."""
        del step
        self._record = HostRecorder()
        yield self._record

    def _fault(self, error: RuntimeError, step: int) -> Fault:
        instructions = self._engine.newest_program.ranks[self._mesh.at.pp]
        # Recorded instructions were issued; the next one failed.
        at = self._record.issued
        return Fault(
            str(error).partition("\n")[0],
            rank=self.peers.rank,
            step=step,
            instruction=describe(instructions[at]) if at < len(instructions) else "",
        )

    def require_finite(self, result: StepResult, step: int) -> None:
        """Stop before a broken state is saved.

        Raises:
            Fault: the loss or the gradient norm is not finite.
        """
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise Fault(
                f"loss {result.loss}, gradient norm {result.grad_norm}: training has diverged. Lower train.lr or "
                "raise train.warmup_steps, and resume from the last checkpoint.",
                rank=self.peers.rank,
                step=step,
            )

    def logprobs(self, batch: Batch) -> Tensor:
        """The log-probability of each target of a whole global batch, on every rank. Every rank calls this together.

        Args:
            batch: the rows of this rank.
        """
        return self._engine.logprobs(microbatches_of(batch, self.run.plan, self._mesh))

    def save(self, position: Position) -> WrittenCheckpoint:
        """Write a checkpoint, unless it exists; then drop old checkpoints. Every rank calls this together.

        Raises:
            DiskFault: the disk does not take the checkpoint: on every rank the same.
        """
        place = checkpoint_at(self.folder.checkpoints, position.step)
        if is_there(self.peers, place):
            return WrittenCheckpoint(place, 0, ())
        size = self.write(place, position)
        return WrittenCheckpoint(place, size, drop_old(place, self.run.config.state.keep, self.peers))

    def retry_step_s(self) -> float | None:
        """Seconds of a step, for the retry of a failed checkpoint; None: retry with the next regular one. Every rank
        calls this together.
        """
        return None

    def look_at_folder(self) -> None:
        """Request a stop after the step if the run directory was moved or removed."""
        if self.watch is not None and self.watch.look():
            self._stop.ask()

    def follow_folder(self) -> RunFolderMoved | None:
        """Move to the run directory's new path; None if it is unchanged. Every rank calls this together."""
        moved = follow(self.watch, self.peers, self.folder)
        if moved is not None:
            self.folder = RunFolder(root=moved.now)
        return moved

    def flushed_to(self, step: int) -> Path | None:
        """The checkpoint that was written from a snapshot; None if it was removed with the run directory."""
        place, old_place = (checkpoint_at(each.checkpoints, step) for each in (self.folder, self._began_in))
        if place == old_place:
            return place
        return next((each for each in (place, old_place) if each.exists()), None)

    def publish(self, root: Path, position: Position, *, keep: int = KEEP) -> PublishedWeights:
        """Write the weights as a snapshot for servers. Every rank calls this together, between two steps.

        Args:
            root: the folder of snapshots, such as one in /dev/shm; all ranks see it.
            position: of training.
            keep: newest snapshots that always stay.
        """
        return publish(
            self._engine, root, self.peers, shapes=self._shapes, position=position, beside=self._files, keep=keep
        )

    def offload(self, folder: Path | None = None) -> OffloadedBuffers:
        """Free the memory of training until the returned value's ``wake``, as while the same ranks serve.

        Args:
            folder: for a file with the state; None keeps it in the host's memory.
        """
        return self._engine.sleep(folder)

    def close(self) -> None:
        """Destroy the process groups."""
        self._mesh.destroy()
