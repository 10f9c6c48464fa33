"""The state of a run on one rank: where it begins, checkpoints, copies in memory, weights for servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.files.weights import KEEP, PublishedWeights
from superstep.state.checkpoint import load, save
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import SnapshotMemory
from superstep.state.tensor_piece import Kind, TensorPiece
from superstep.state.verify import drop_old, is_there
from superstep.train.run_folder.after_checkpoint import WrittenCheckpoint
from superstep.train.run_folder.folder_watch import FolderWatch, RunFolderMoved, follow
from superstep.train.run_folder.identity import FILE, identity_text, require_same_run
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.snapshot_schedule import SnapshotSchedule
from superstep.train.weights.initial_weights import fill_start
from superstep.train.weights.lora_base import files_of, resume_base
from superstep.train.weights.model import tensors_of
from superstep.train.weights.publish_weights import publish

Texts = Mapping[str, str]


class RunState:
    """One rank's part of the state.

    Args:
        world: the launched ranks.
        run: the resolved run.
        engine: of this rank.
        folder: the run directory.
        identity: of the run, for checkpoints; empty where nothing resumes from them.
        files: texts of a checkpoint and of published weights, by name; rank 0's count.

    Attributes:
        peers: the ranks.
        copies: snapshots in memory that outlives this rank, if any.
        watch: of the run directory; None but on rank 0.
    """

    def __init__(
        self, world: World, run: Resolved, engine: Engine, *, folder: RunFolder, identity: Texts, files: Texts
    ) -> None:
        self.run = run
        self.folder = self._began_in = folder
        self.peers = RankPeers(world.rank, world.size)
        self.copies = SnapshotSchedule(run.config.state.snapshot_every)
        self.watch: FolderWatch | None = None
        self._engine = engine
        self._mesh = engine.mesh
        self._tensors = tensors_of(engine)
        self._identity = identity
        self._files = {**files, FILE: identity_text(identity)} if identity else dict(files)

    def advance(self, position: Position, *, samples: int, tokens: int) -> Position:
        """The position after one more step.

        Args:
            position: before it.
            samples: the cursor of the data after it.
            tokens: valid tokens of its batch.
        """
        return Position(
            step=position.step + 1,
            samples=samples,
            tokens=position.tokens + tokens,
            loss_scale=self._engine.loss_scale,
        )

    def begin(self, folder: Path | None) -> None:
        """Start with the weights of a folder, or of a run's newest checkpoint, if given. Adapters are trained on top of
        them. Every rank calls this together.

        Raises:
            StateError: the weights are missing, or belong to another model.
        """
        if folder is not None:
            self._files |= fill_start(self.run, self._engine, self.peers, folder, self._tensors["weight"])
            self._engine.note_loaded(0)

    def load(self, checkpoint: Path) -> Position:
        """Resume from a checkpoint; adapters also need their base weights."""
        require_same_run(checkpoint, self._identity, converts=self.run.config.state.convert)
        position = self.read(checkpoint)
        if self.run.config.lora is not None:
            base = resume_base(self.run, self._engine, self.peers, checkpoint)
            self._files |= files_of(self.run, base)
        return position

    def read(self, place: Path, kinds: Sequence[Kind] | None = None) -> Position:
        """Read the state, or some kinds of it, from a checkpoint. Every rank calls this together.

        Raises:
            StateError: it is damaged, or belongs to another model: on every rank the same. Nothing has changed.
        """
        position = load(place, self._engine.pieces(kinds), self.peers, converts=self.run.config.state.convert)
        self._engine.note_loaded(position.step, position.loss_scale)
        return position

    def write(self, place: Path, position: Position) -> int:
        """Write the state as a checkpoint; its bytes. Every rank calls this together.

        Raises:
            DiskFault: the disk does not take it: on every rank the same.
        """
        return save(place, self._engine.pieces(), position, self.peers, tensors=self._tensors, beside=self._files)

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
        snapshots = self._engine.keep_snapshots(memory)
        slots = self.copies.keep(snapshots, epoch, is_whole=self.run.config.freeze is None)
        if recovered is None:
            pieces = self._engine.list_trained_pieces()
            snapshots.lay_out(pieces, self._tensors, self._files, self.folder.checkpoints, slots)
            return None
        position = snapshots.restore(recovered)
        self._engine.note_loaded(position.step, position.loss_scale)
        return position

    def restore(self, step: int) -> Position:
        """Restore a complete state from memory, on every rank. Every rank calls this together.

        Raises:
            DamagedCheckpoint: a rank's copy has other bits than were copied; on every rank the same, before anything is
                changed.
        """
        position = self.copies.fill(step, self.peers)
        self._engine.note_loaded(step, position.loss_scale)
        return position

    def pieces(self, kinds: Sequence[Kind] | None = None) -> Iterator[TensorPiece]:
        """This rank's pieces of the state."""
        return self._engine.pieces(kinds)

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

    def follow_folder(self) -> RunFolderMoved | None:
        """Move to the run directory's new path; None if it is unchanged. Every rank calls this together."""
        moved = follow(self.watch, self.peers, self.folder)
        if moved is not None:
            self.folder = RunFolder(root=moved.now)
        return moved

    def find_flushed(self, step: int) -> Path | None:
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
            self._engine,
            root,
            self.peers,
            shapes=self._tensors["weight"],
            position=position,
            beside=self._files,
            keep=keep,
        )

    def close(self) -> None:
        """Destroy the process groups."""
        self._mesh.destroy()
