"""The trainer of an iteration, on one rank: an engine, its state on disk, and its weights for the sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from superstep.comm.mesh import build_mesh
from superstep.data.token_stream import Batch
from superstep.engine.engine import Engine, StepResult
from superstep.engine.offload import Sleeping
from superstep.errors import Fault
from superstep.launch.ranks import World
from superstep.numerics.objective import CROSS_ENTROPY, Objective
from superstep.plan.resolve import Resolved
from superstep.program.text import write_program
from superstep.state.checkpoint import load, save
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.load_weights import fill
from superstep.state.manifest import Position
from superstep.state.tensor_piece import STATE
from superstep.state.verify import drop_old, is_there
from superstep.train.after_checkpoint import Written
from superstep.train.batches import microbatches_of
from superstep.train.folder_watch import Displaced, FolderWatch, follow
from superstep.train.identity import FILE as IDENTITY
from superstep.train.identity import identity_of, identity_text, require_same_run
from superstep.train.lora_base import begin_base, files_of, resume_base
from superstep.train.lr_schedule import rate
from superstep.train.model import model_alone, shapes_of, units_of
from superstep.train.publish_weights import publish
from superstep.train.rank_peers import RankPeers, tensor_shapes
from superstep.train.run_paths import RunFolder, write_whole

MESH_TIMEOUT = timedelta(minutes=10)


class Differs(Exception):
    """A log-probability is not the one that is known from before."""


class Learner:
    """What shared ranks, or a trainer's own, do of an iteration.

    Args:
        world: the launched ranks.
        run: the resolved run.
        folder: the run directory.
        beside: text files of a checkpoint and of a snapshot; rank 0's count.
        temperature: that answers are sampled with; it divides the logits of the trainer and of the reference, too.

    Attributes:
        position: where training stands.
        peers: the ranks.
        watch: of the run directory: rank 0's.
    """

    def __init__(
        self, world: World, run: Resolved, folder: RunFolder, beside: Mapping[str, str], *, temperature: float = 1.0
    ) -> None:
        self.run = run
        self.position = Position()
        self.peers = RankPeers(world.rank, world.size)
        self._world = world
        self._folder = folder
        self._identity = identity_of(run)
        self._beside = {**beside, IDENTITY: identity_text(self._identity)}
        self._mesh = build_mesh(run.plan, world.rank, world.device, timeout=MESH_TIMEOUT)
        self._temperature = temperature
        self._engine = Engine(run, units_of(run), self._mesh, heart=world.heart, temperature=temperature)
        self._shapes = tensor_shapes(self._engine)
        self._asleep: list[Sleeping] = []
        self._reference: Engine | None = None
        self.watch: FolderWatch | None = None

    def begin(self, checkpoint: Path | None, start: Path | None) -> None:
        """Go on from a checkpoint, or begin with the weights of a folder; adapters stand beside these."""
        if checkpoint is not None:
            require_same_run(checkpoint, self._identity)
            self.position = load(checkpoint, self._engine.pieces(STATE), self.peers)
        if self.run.config.lora is not None:
            self._stand_on(checkpoint, start)
        elif checkpoint is None and start is not None:
            fill(start, self._engine.pieces(("weight",)), self._shapes, self.peers)
        self._engine.loaded(self.position.step)
        if self.peers.rank == 0:
            write_whole(self._folder.program, write_program(self._engine.step_program))

    def _stand_on(self, checkpoint: Path | None, start: Path | None) -> None:
        """Read the weights that adapters add to, and have every folder of adapters say which those are."""
        if checkpoint is not None:
            base = resume_base(self.run, self._engine, self.peers, checkpoint)
        else:
            assert start is not None, "adapters begin beside a model"
            base = begin_base(self.run, self._engine, self.peers, start)
        if self.peers.rank == 0:
            self._beside |= files_of(self.run, base)

    def keep_reference(self, start: Path) -> None:
        """Keep the weights of a folder beside those that are trained, to say what they say. Adapters leave these as
        they are: then both have the same memory, where each rank has them whole.
        """
        run = model_alone(self.run)
        self._reference = Engine(
            run, units_of(run), self._mesh, learns=False, heart=self._world.heart, temperature=self._temperature
        )
        if self.run.config.lora is not None and not self._reference.is_cut:
            self._reference.share_frozen(self._engine)
        else:
            fill(start, self._reference.frozen_pieces(), shapes_of(run), self.peers)
        self._reference.loaded(0)

    def reference(self, batch: Batch) -> Tensor:
        """``logprobs`` of the weights that are kept."""
        assert self._reference is not None, "a reference was asked for"
        return self._reference.logprobs(microbatches_of(self.mine(batch), self.run.plan, self._mesh)).cpu()

    @property
    def multiple(self) -> int:
        """Of which the rows of a global batch are one: each place has whole microbatches, and where they pass several
        stages as many as the plan says, or that several times.
        """
        plan = self.run.plan
        each = plan.microbatch * (1 if plan.mesh.pp == 1 else plan.microbatches)
        return plan.mesh.dp * each

    def mine(self, batch: Batch) -> Batch:
        """The rows of a global batch that this rank trains on."""
        count = len(batch.tokens_BS) // self.run.plan.mesh.dp
        return batch.rows(slice(self._mesh.at.dp * count, (self._mesh.at.dp + 1) * count))

    def step(self, batch: Batch, objective: Objective = CROSS_ENTROPY, *, is_checked: bool = False) -> StepResult:
        """One step on a global batch.

        Args:
            batch: whole; each rank takes its rows.
            objective: what is made of its streams.
            is_checked: whether each log-probability must be the one that is known from before, to the bit.

        Raises:
            Differs: one is not. The weights are as they were.
            Fault: the loss or the gradient's norm is no number.
        """
        step = self.position.step + 1

        def inspect() -> None:
            if is_checked and self._engine.measures["max_dlogp"] != 0.0:
                raise Differs

        result = self._engine.train_step(
            microbatches_of(self.mine(batch), self.run.plan, self._mesh),
            valid_tokens=batch.valid_tokens,
            divisor=batch.divisor,
            lr=rate(self.run.config.train, self.position.step),
            objective=objective,
            inspect=inspect,
            stop=self._world.stop,
        )
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise Fault(
                f"loss {result.loss}, gradient norm {result.grad_norm}: training has diverged. Lower train.lr, and "
                "resume from the last checkpoint.",
                rank=self.peers.rank,
                step=step,
            )
        self.position = Position(
            step=step,
            samples=self.position.samples + len(batch.tokens_BS),
            tokens=self.position.tokens + result.tokens,
        )
        return result

    def logprobs(self, batch: Batch) -> Tensor:
        """The log-probability of each target of a global batch, with the weights as they are: fp32 [B, S], whole."""
        return self._engine.logprobs(microbatches_of(self.mine(batch), self.run.plan, self._mesh)).cpu()

    def weights(self) -> dict[str, Tensor] | None:
        """The weights whole, by name: the memory that is trained. None where this rank has a part of them, or gives its
        memory back to who samples; and of adapters, which are handed over in a folder.
        """
        if self._world.device.kind != "cpu" or self.run.config.lora is not None:
            return None
        pieces = list(self._engine.pieces(("weight",)))
        if {piece.name for piece in pieces} != self._shapes.keys():
            return None
        if any(piece.values.numel() != math.prod(piece.shape) for piece in pieces):
            return None
        return {piece.name: piece.values.view(piece.shape) for piece in pieces}

    def publish(self, version: int, root: Path) -> Path:
        """Write the weights, of which this is the version, as a snapshot. Every rank calls this together."""
        assert version == self.position.step, "the program says when"
        # Who retires one is the program; nothing is cleaned away behind its back.
        return publish(
            self._engine,
            root,
            self.peers,
            shapes=self._shapes,
            position=self.position,
            beside=self._beside,
            keep=1 << 30,
        ).path

    def follow_folder(self) -> Displaced | None:
        """Save where the run directory is now; None where it is where it was. Every rank calls this together."""
        found = follow(self.watch, self.peers, self._folder)
        if found is not None:
            self._folder = RunFolder(root=found.now)
        return found

    def save(self) -> Written:
        """Write a checkpoint, unless it is there, and drop those that are too old. Every rank calls this together.

        Raises:
            DiskFault: the disk does not take it: on every rank the same.
        """
        place = checkpoint_at(self._folder.checkpoints, self.position.step)
        if is_there(self.peers, place):
            return Written(place, 0, ())
        size = save(
            place,
            self._engine.pieces(STATE),
            self.position,
            self.peers,
            tensors=dict.fromkeys(STATE, self._shapes),
            beside=self._beside,
        )
        return Written(place, size, drop_old(place, self.run.config.state.keep, self.peers))

    def sleep(self) -> None:
        """Give the memory of training back while shared ranks sample. On a CPU it would go from memory to memory."""
        if self._world.device.kind != "cpu":
            self._asleep = [engine.sleep() for engine in (self._engine, self._reference) if engine is not None]

    def wake(self) -> None:
        """Take it again."""
        for held in self._asleep:
            held.wake()
        self._asleep = []

    def close(self) -> None:
        """Give the process groups back."""
        self._mesh.destroy()
