"""One rank of a training run, assembled: engine, data, and the run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from superstep.comm.mesh import build_mesh
from superstep.data.prefetch import Prefetcher
from superstep.data.token_files import SplitName, open_corpus
from superstep.data.token_stream import Batch, BatchSource
from superstep.engine.engine import Engine, StepResult
from superstep.engine.instruction_timer import HostRecorder, Recorder, recorder_for
from superstep.engine.offload import Sleeping
from superstep.engine.router_counts import Routed
from superstep.engine.torch_profiler import Profiler
from superstep.errors import Damaged, Fault, StateError
from superstep.launch.ranks import World
from superstep.observe.jsonl import read
from superstep.plan.resolve import Resolved
from superstep.program.text import describe, write_program
from superstep.serve.weights import PublishedWeights
from superstep.state.all_or_none import together
from superstep.state.checkpoint import load, save
from superstep.state.checkpoint_dirs import checkpoint_at, checkpoints, step_of
from superstep.state.load_weights import fill
from superstep.state.manifest import Position
from superstep.state.memory_snapshot import HOSTS_SLOTS, SLOTS, SnapshotMemory, damaged_text
from superstep.state.tensor_piece import STATE, Kind, TensorPiece
from superstep.state.verify import drop_old, is_there, verify_weights
from superstep.train.after_checkpoint import Written, trace_of, write_trace
from superstep.train.base_file import Base
from superstep.train.batches import microbatches_of, rows, stream_of
from superstep.train.folder_watch import Displaced, FolderWatch, follow
from superstep.train.hf_files import hf_files
from superstep.train.identity import FILE as IDENTITY
from superstep.train.identity import identity_of, identity_text, require_same_run
from superstep.train.lora_base import begin_base, drawn_base, files_of, resume_base
from superstep.train.lr_schedule import rate
from superstep.train.model import units_of
from superstep.train.policy.corruption_check import Integrity, ranks_text
from superstep.train.policy.gradient_recheck import DIFFERS, Rehearsal
from superstep.train.policy.sequence_loss import Epochs, SequenceLoss, weigh
from superstep.train.policy.spike_detector import SpikeDetector
from superstep.train.publish_weights import publish
from superstep.train.rank_peers import RankPeers, tensor_shapes
from superstep.train.run_paths import RunFolder, write_whole
from superstep.train.save_schedule import Saves
from superstep.train.snapshot_schedule import Copies
from superstep.train.throughput import Meter, PeakRate
from superstep.train.weights_folder import weights_of

MESH_TIMEOUT = timedelta(minutes=10)


def _beside(run: Resolved, corpus: Path) -> dict[str, str]:
    """The text files of a checkpoint, which rank 0 writes. They are made before the first step, as they may fail."""
    files = hf_files(run.config, run.decoder, corpus / "tokenizer.json")
    corpus_text = (corpus / "corpus.json").read_text(encoding="utf-8")
    return files | {"corpus.json": corpus_text, IDENTITY: identity_text(identity_of(run, corpus))}


class Session:
    """Everything the loop drives.

    Args:
        world: the launched ranks.
        run: the resolved run.
        folder: the run directory, prepared.
        corpus: the folder of token files, prepared.
        rate: what MFU is measured by, where it is known.
        through: what the batches of the training stream go through before they are read ahead.
        lesson: what is learnt of a batch, where that is not each of its targets.
    """

    def __init__(
        self,
        world: World,
        run: Resolved,
        folder: RunFolder,
        corpus: Path,
        rate: PeakRate,
        *,
        through: Callable[[BatchSource], BatchSource] = lambda stream: stream,
        lesson: SequenceLoss | None = None,
    ) -> None:
        self.run = run
        self.folder = self._began_in = folder
        self.meter = Meter(world.device, rate, world.size)
        self._device = world.device
        self._stop = world.stop
        self.heart = world.heart
        self._peers = RankPeers(world.rank, world.size)
        self._mesh = build_mesh(run.plan, world.rank, world.device, timeout=MESH_TIMEOUT)
        self._engine = Engine(run, units_of(run), self._mesh, heart=world.heart)
        self.integrity = Integrity(run.config.state.fingerprint_every, self._engine, self._peers)
        self._shapes = tensor_shapes(self._engine)
        self._corpus = open_corpus(corpus)
        if (self._corpus.manifest.kind == "pairs") != (lesson is not None):
            verb = {"text": "train", "answers": "tune sft", "pairs": "tune dpo"}[self._corpus.manifest.kind]
            raise StateError(f"the tokens in {corpus} are those of superstep {verb}; go on with the run by that.")
        self._beside = _beside(run, corpus) if world.rank == 0 else {}
        if run.config.lora is not None:
            self._stands_on(drawn_base(run))
        self.bytes_per_token = self._corpus.manifest.bytes_per_token
        self._lesson = lesson
        self._train = through(self._stream("train"))
        self._validation = self._stream("validation")
        self._rehearsal = Rehearsal(run, self._engine, self._train, self.integrity)
        self._record: Recorder = HostRecorder()
        mine = self._engine.step_program.ranks[self._mesh.at.pp]
        self._profiler = Profiler(run.config.observe.profile, folder.profiles, world.rank, world.device, mine)
        self.copies = Copies(run.config.state.snapshot_every)
        self.saves = Saves(run.config.state.save_every, run.config.state.save_patience)
        self.course = SpikeDetector(run.config.rollback, run.config.train.skip)
        self.watch: FolderWatch | None = None
        """Of the run directory: rank 0's."""

    def _stream(self, split: SplitName) -> Epochs:
        stream = stream_of(self.run.config, self._corpus, split)
        return stream if self._lesson is None else self._lesson.stream(stream, self._corpus.folder, split)

    @property
    def transport(self) -> str:
        """How the ranks reach each other; empty where there is one."""
        return self._mesh.transport.describe() if self._mesh.shape.world > 1 else ""

    @property
    def unpinned(self) -> str:
        """Why a GPU cannot copy straight into the memory of snapshots; empty where it can, or there are none."""
        return "" if self.copies.snapshots is None else self.copies.snapshots.unpinned

    def describe(self) -> None:
        """Write the program that runs into the run directory."""
        write_whole(self.folder.program, write_program(self._engine.step_program))

    def begin(self) -> Position:
        """Start with the weights that ``model.weights`` names, where it names any. Every rank calls this together.

        Raises:
            StateError: there are none, or they are not this model's.
        """
        named = self.run.config.model.weights
        if named is not None:

            def unreadable(error: Exception) -> StateError:
                return StateError(f"model.weights = '{named}' cannot be read ({error}).")

            # One rank says which: another run may be writing the next checkpoint.
            found = together(self._peers, lambda: weights_of(Path(named)) if not self._peers.rank else None, unreadable)
            assert found[0] is not None
            verify_weights(found[0], self._peers)
            if self.run.config.lora is not None:
                self._stands_on(begin_base(self.run, self._engine, self._peers, found[0]))
            else:
                fill(found[0], self._engine.pieces(("weight",)), self._shapes, self._peers)
            self._engine.loaded(0)
        if self._lesson is not None:
            self._lesson.remember(self)
        return Position()

    def _stands_on(self, base: Base) -> None:
        """Note the weights that adapters are trained beside."""
        if self._peers.rank == 0:
            self._beside |= files_of(self.run, base)

    def load(self, checkpoint: Path) -> Position:
        """Go on from a checkpoint; with adapters, beside the weights that it was trained beside."""
        if self._lesson is not None and not self._lesson.is_remembered(self):
            self.begin()
        self.integrity.forget()
        require_same_run(checkpoint, identity_of(self.run, self._corpus.folder))
        position = load(checkpoint, self._engine.pieces(STATE), self._peers)
        if self.run.config.lora is not None:
            self._stands_on(resume_base(self.run, self._engine, self._peers, checkpoint))
        self._engine.loaded(position.step)
        return position

    def keep_snapshots(self, memory: SnapshotMemory, recovered: int | None, *, epoch: int = 0) -> Position | None:
        """Copy the state into a memory that outlives this rank, from here on.

        Args:
            memory: of this rank.
            recovered: the step whose state is in it and shall be gone on from, if any.
            epoch: how often launchers of several hosts have started ranks: none of them has all memories, and ranks
                write checkpoints. 0 where one launcher does.

        Returns:
            Where training stands, if that.
        """
        self.copies.snapshots = snapshots = self._engine.keep_snapshots(memory)
        self.copies.is_flushed = epoch == 0
        snapshots.turn = epoch << 32
        slots = HOSTS_SLOTS if epoch else SLOTS
        if recovered is None:
            snapshots.lay_out(self._engine.pieces(STATE), self._shapes, self._beside, self.folder.checkpoints, slots)
            return None
        position = snapshots.restore(recovered)
        self._engine.loaded(position.step)
        return position

    def restore(self, step: int) -> Position:
        """Go back to the state of a step that is whole in memory, on every rank. Every rank calls this together.

        Raises:
            Damaged: some rank's has other bits than were copied; on every rank the same, before anything is changed.
        """
        assert self.copies.snapshots is not None
        is_damaged = self._peers.gather(self.copies.snapshots.is_damaged(step))
        if any(is_damaged):
            raise Damaged(f"{ranks_text([r for r, each in enumerate(is_damaged) if each])}: {damaged_text(step)}")
        self.integrity.forget()
        position = self.copies.snapshots.fill(step)
        self._engine.loaded(step)
        return position

    def recall(self, position: Position) -> None:
        """Remember what this run has told of its steps before, and saved. Every rank calls this together."""
        known = list(read(self.folder.metrics)) if not self._peers.rank and self.folder.metrics.exists() else []
        taken = [line for line in known if line.get("event") == "step" and line["step"] <= position.step]
        wanted = [line for line in known if line.get("event") == "rolled_back"] + taken[-self.course.window_steps :]
        found = [] if self._peers.rank else checkpoints(self.folder.checkpoints)
        lines, newest = self._peers.gather((wanted, step_of(found[-1]) if found else 0))[0]
        self.course.recall(lines, position.step)
        self.saves.note_saved(newest)

    def want(self, position: Position) -> bool:
        """Have the state as it is now written to disk while training goes on; False where nobody does so."""
        return self.copies.want(position)

    def pieces(self, kinds: Sequence[Kind]) -> Iterator[TensorPiece]:
        """What this rank holds of the state."""
        return self._engine.pieces(kinds)

    @contextmanager
    def batches(self, sample: int, steps: int) -> Iterator[Prefetcher]:
        """This rank's rows of the next global batches from a cursor on, read ahead."""
        depth = self.run.config.data.prefetch_steps
        mine = rows(self.run.plan, self._mesh)
        with Prefetcher(self._train, start_sample=sample, rows=mine, depth=depth, steps=steps) as found:
            yield found

    def learning_rate(self, step: int) -> float:
        """The rate of the update that follows ``step`` finished steps."""
        return rate(self.run.config.train, step)

    def step(self, batch: Batch, lr: float, *, step: int, sample: int | None = None) -> StepResult:
        """One training step, the ``step``-th. Where the cursor of its batch is given, its gradient may be held against
        what other ranks compute.

        Raises:
            Fault: what torch raised, with the instruction that it was raised in.
        """
        self._record = recorder_for(self._device, is_kept=self.is_saved(step))
        self.integrity.watch(is_due=self.integrity.is_due(step, is_saved=self.is_saved(step)))
        try:
            rehearsed = None
            if sample is not None and self._lesson is None and self._rehearsal.is_due(step):
                rehearsed = self._rehearsal.gradient(sample, shift=1)
            weighed = None
            if self._lesson is not None:
                batch, weighed = weigh(self._lesson, self, batch)

            def judge(loss: float, norm: float) -> str:
                told = loss if weighed is None else weighed.loss / (batch.divisor or batch.valid_tokens)
                why = self.integrity.at_rest(step - 1) or self.course.why_not(told, norm)
                if not why and rehearsed is not None and self.integrity.gradient() != rehearsed:
                    return DIFFERS
                return why

            with self._profiler.watching(step, self._record) as record:
                result = self._engine.train_step(
                    microbatches_of(batch, self.run.plan, self._mesh),
                    valid_tokens=batch.valid_tokens,
                    divisor=batch.divisor,
                    lr=lr,
                    judge=judge if self._has_judge else None,
                    record=record,
                    stop=self._stop,
                )
            if result.refused == DIFFERS:
                assert sample is not None
                self.integrity.note_recomputed(self._rehearsal.blame(sample, step))
            if result.refused and self.course.rules is None and not self.integrity.has_found:
                raise Fault(result.refused, rank=self._peers.rank, step=step)  # a sum has left its exact range
            if weighed is None:
                return result
            loss = weighed.loss / (batch.divisor or batch.valid_tokens)
            return replace(result, loss=loss, measures={**result.measures, **weighed.measures})
        except RuntimeError as error:
            raise self._fault(error, step) from error

    @property
    def _has_judge(self) -> bool:
        state = self.run.config.state
        return self.course.rules is not None or (state.fingerprint_every or state.recompute_every) is not None

    def logprobs(self, batch: Batch) -> Tensor:
        """The log-probability of each target of a whole global batch, on every rank. Every rank calls this together.

        Args:
            batch: the rows of this rank.
        """
        return self._engine.logprobs(microbatches_of(batch, self.run.plan, self._mesh))

    @property
    def rows(self) -> slice:
        """The rows of a global batch that this rank reads."""
        return rows(self.run.plan, self._mesh)

    @property
    def corpus(self) -> Path:
        """The folder of token files."""
        return self._corpus.folder

    @property
    def peers(self) -> RankPeers:
        """The ranks of the run."""
        return self._peers

    def is_saved(self, step: int) -> bool:
        """Whether a checkpoint follows the step, and with it its trace."""
        return self.saves.is_due(step) or step == self.run.config.train.steps

    def _fault(self, error: RuntimeError, step: int) -> Fault:
        instructions = self._engine.step_program.ranks[self._mesh.at.pp]
        # What is on record has been issued; the next one was not.
        at = self._record.issued
        return Fault(
            str(error).partition("\n")[0],
            rank=self._peers.rank,
            step=step,
            instruction=describe(instructions[at]) if at < len(instructions) else "",
        )

    def require_finite(self, result: StepResult, step: int) -> None:
        """Stop before a broken state is saved.

        Raises:
            Fault: the loss or the gradient norm is not a number.
        """
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise Fault(
                f"loss {result.loss}, gradient norm {result.grad_norm}: training has diverged. Lower train.lr or "
                "raise train.warmup_steps, and resume from the last checkpoint.",
                rank=self._peers.rank,
                step=step,
            )

    @property
    def has_routers(self) -> bool:
        """Whether the model has experts."""
        return self._engine.routers is not None

    def routed(self) -> Routed:
        """What the routers of all ranks did since this was last asked. Every rank calls this together."""
        assert self._engine.routers is not None
        return self._engine.routers.take()

    def validation_loss(self) -> float:
        """Nats per valid token over the first batches of the held-out text."""
        size = self.run.config.train.batch_sequences
        count = max(1, min(self.run.config.train.eval_batches, self._validation.sequences // size))
        total, tokens = 0.0, 0.0
        for number in range(count):
            batch = self._validation.batch(number * size, rows(self.run.plan, self._mesh))
            if self._lesson is not None:
                loss = self._lesson.weigh(batch, self.logprobs(batch)).loss
                valid = batch.divisor or batch.valid_tokens
            else:
                loss, valid = self._engine.evaluate(microbatches_of(batch, self.run.plan, self._mesh))
            total, tokens = total + loss, tokens + valid
        self.meter.ask_memory()
        return total / tokens

    def save(self, position: Position) -> Written:
        """Write a checkpoint, and the trace of the last step beside it; then drop checkpoints that are too old. Every
        rank calls this together.

        Raises:
            DiskFault: the disk does not take the checkpoint: on every rank the same.
        """
        place = checkpoint_at(self.folder.checkpoints, position.step)
        if self.copies.snapshots is not None and is_there(self._peers, place):
            return Written(place, 0, self.write_trace(position.step))
        size = save(
            place,
            self._engine.pieces(STATE),
            position,
            self._peers,
            tensors=dict.fromkeys(STATE, self._shapes),
            beside=self._beside,
        )
        problems = drop_old(place, self.run.config.state.keep, self._peers)
        return Written(place, size, problems + self.write_trace(position.step))

    def look_at_folder(self) -> None:
        """Ask for a stop after the step where the run directory is no longer where it was."""
        if self.watch is not None and self.watch.look():
            self._stop.ask()

    def follow_folder(self) -> Displaced | None:
        """Save where the run directory is now; None where it is where it was. Every rank calls this together."""
        found = follow(self.watch, self._peers, self.folder)
        if found is not None:
            self.folder = RunFolder(root=found.now)
        return found

    def flushed_to(self, step: int) -> Path | None:
        """Where the checkpoint is that was written from a snapshot; None where it went with a run directory that was
        removed.
        """
        place, old_place = (checkpoint_at(each.checkpoints, step) for each in (self.folder, self._began_in))
        if place == old_place:
            return place
        return next((each for each in (place, old_place) if each.exists()), None)

    def write_trace(self, step: int) -> tuple[str, ...]:
        """Write the trace of the last step; why it could not be, if so. Every rank calls this together."""
        trace = trace_of(self._record, step, mesh=self._mesh, device=self._device)
        return write_trace(self._peers, self.folder, trace)

    def publish(self, root: Path, position: Position) -> PublishedWeights:
        """Write the weights as a snapshot for servers. Every rank calls this together, between two steps.

        Args:
            root: the folder of snapshots, such as one in /dev/shm; all ranks see it.
            position: where training stands.
        """
        return publish(self._engine, root, self._peers, shapes=self._shapes, position=position, beside=self._beside)

    def sleep(self, folder: Path | None = None) -> Sleeping:
        """Give the memory of training back until the returned value's ``wake``, as while the same ranks serve.

        Args:
            folder: for a file with what was held; None keeps that in the host's memory.
        """
        return self._engine.sleep(folder)

    def close(self) -> None:
        """Give the process groups back."""
        self._mesh.destroy()
