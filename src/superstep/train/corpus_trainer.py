"""Training on a corpus, for train, sft and dpo: batches of tokens, validation, traces of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from superstep.data.batch import Batch, BatchSource, SplitName
from superstep.data.prefetch import Prefetcher
from superstep.data.sources.source import DataStream, bytes_per_token, check_kind, open_source, stream_of
from superstep.engine.engine import StepResult
from superstep.engine.instruction_timer import Recorder, recorder_for
from superstep.engine.router_counts import RoutingResult
from superstep.engine.torch_profiler import Profiler
from superstep.engine.values.microbatch import microbatches_of, rows, rows_at
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.state.manifest import Position
from superstep.train.open_engine import open_engine
from superstep.train.policy.sequence_loss import SequenceLoss, weigh
from superstep.train.run_folder.after_checkpoint import WrittenCheckpoint, trace_of, write_trace
from superstep.train.run_folder.identity import identity_of
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate, ThroughputMeter
from superstep.train.trainer import Trainer
from superstep.train.weights.checkpoint_files import files_beside_corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The model on held-out data.

    Attributes:
        loss: nats per valid token, or per target of a sample.
        accuracy: the share of class numbers that have the highest logit; None where the targets are no classes.
    """

    loss: float
    accuracy: float | None = None


class CorpusTrainer(Trainer):
    """A trainer on the data of a run: the tokens of a corpus, or the samples of a user's file.

    Args:
        world: the launched ranks.
        run: the resolved run.
        folder: the run directory, prepared.
        corpus: the folder of token files, prepared; or the file of samples.
        rate: operations and peak for MFU, if known.
        through: transforms the training batches before they are prefetched.
        sequence_loss: a loss of whole sequences; None for a loss of each target.
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
        sequence_loss: SequenceLoss | None = None,
    ) -> None:
        self.meter = ThroughputMeter(world.device, rate, world.size)
        self.corpus = corpus
        self._source = open_source(corpus)
        check_kind(self._source, corpus, is_pairs=sequence_loss is not None)
        # Before the first step, as it may fail.
        files = files_beside_corpus(run, corpus) if world.rank == 0 else {}
        engine, identity = open_engine(world, run), identity_of(run, corpus)
        super().__init__(world, run, engine, folder=folder, identity=identity, files=files)
        self.bytes_per_token = bytes_per_token(self._source)
        self._sequence_loss = sequence_loss
        self._train = through(self._stream("train"))
        self._validation = self._stream("validation")
        mine = self._engine.step_program.ranks[self._mesh.at.pp]
        self._profiler = Profiler(run.config.observe.profile, folder.profiles, world.rank, world.device, mine)

    def _stream(self, split: SplitName) -> DataStream:
        stream = stream_of(self.run.config, self._source, split)
        return stream if self._sequence_loss is None else self._sequence_loss.stream(stream, self.corpus, split)

    @property
    def transport(self) -> str:
        """The ranks' transport; empty for one rank."""
        return self._mesh.transport.describe() if self._mesh.shape.world > 1 else ""

    @property
    def rows(self) -> slice:
        """Rows of a global batch that this rank reads."""
        return rows(self.run.plan, self._mesh)

    def start(self) -> Position:
        """Start with the weights of ``model.weights``, if set. Every rank calls this together.

        Raises:
            StateError: the weights are missing, or belong to another model.
        """
        named = self.run.config.model.weights
        self.begin(None if named is None else Path(named))
        if self._sequence_loss is not None:
            self._sequence_loss.remember(self)
        return Position()

    def load(self, checkpoint: Path) -> Position:
        """Resume from a checkpoint; adapters also need their base weights."""
        if self._sequence_loss is not None and not self._sequence_loss.is_remembered(self):
            self.start()
        return super().load(checkpoint)

    @contextmanager
    def batches(self, sample: int, steps: int) -> Iterator[Prefetcher]:
        """Prefetch this rank's rows of the next global batches, from cursor ``sample``."""
        depth = self.run.config.data.prefetch_steps
        mine = rows(self.run.plan, self._mesh)
        with Prefetcher(self._train, start_sample=sample, rows=mine, depth=depth, steps=steps) as prefetcher:
            yield prefetcher

    def step(self, batch: Batch, lr: float, *, step: int, sample: int | None = None) -> StepResult:
        """One training step, the ``step``-th. With ``sample``, the cursor of its batch, its gradient may be checked
        against other ranks'.
        """
        if self._sequence_loss is not None:
            batch, weighed = weigh(self._sequence_loss, self, batch)
            return self.take_step(batch, lr, step=step, weighed=weighed)
        rows_of = None if sample is None else partial(self._rows_of, sample)
        return self.take_step(batch, lr, step=step, rows_of=rows_of)

    def _rows_of(self, sample: int, place: int) -> Batch:
        return self._train.batch(sample, rows_at(self.run.plan, place))

    @contextmanager
    def _recording(self, step: int) -> Iterator[Recorder]:
        self._record = recorder_for(self._device, is_kept=self.is_saved(step))
        with self._profiler.watching(step, self._record) as record:
            yield record

    @property
    def has_routers(self) -> bool:
        return self._engine.routers is not None

    def gather_routing(self) -> RoutingResult:
        """Statistics of all ranks' routers since the last call. Every rank calls this together."""
        assert self._engine.routers is not None
        return self._engine.routers.take()

    def validate(self) -> Validation:
        """Validate on the first batches of the held-out data. Every rank calls this together."""
        size = self.run.config.train.batch_sequences
        count = max(1, min(self.run.config.train.eval_batches, self._validation.sequences // size))
        total, targets = 0.0, 0.0
        correct: float | None = 0.0 if self._sequence_loss is None else None
        for number in range(count):
            batch = self._validation.batch(number * size, rows(self.run.plan, self._mesh))
            if self._sequence_loss is not None:
                loss = self._sequence_loss.weigh(batch, self.logprobs(batch)).loss
                valid = batch.divisor or batch.valid_tokens
            else:
                score = self._engine.score(microbatches_of(batch, self.run.plan, self._mesh))
                loss, valid = score.loss, score.targets
                correct = None if correct is None or score.correct is None else correct + score.correct
            total, targets = total + loss, targets + valid
        self.meter.ask_memory()
        return Validation(loss=total / targets, accuracy=None if correct is None else correct / targets)

    def save(self, position: Position) -> WrittenCheckpoint:
        """Write a checkpoint and the trace of the last step; then drop old checkpoints. Every rank calls this together.

        Raises:
            DiskFault: the disk does not take the checkpoint: on every rank the same.
        """
        written = super().save(position)
        return WrittenCheckpoint(written.path, written.bytes, written.problems + self.write_trace(position.step))

    def write_trace(self, step: int) -> tuple[str, ...]:
        """Write the trace of the last step; returns problems. Every rank calls this together."""
        trace = trace_of(self._record, step, mesh=self._mesh, device=self._device)
        return write_trace(self.peers, self.folder, trace)

    def retry_step_s(self) -> float | None:
        """Typical seconds of a step. Every rank calls this together."""
        return self.peers.gather(self.meter.typical_step_s(), float | None)[0]
