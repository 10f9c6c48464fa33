"""The trainer: one rank's engine and its state, the steps, and the policy of a step.

    pretraining, sft, dpo     CorpusTrainer    batches of a corpus, validation
    rewards                   PolicyTrainer    batches of rollouts, a reference, versions of the weights
    Tinker                    AdapterTrainer   gradients and updates on a client's request

They differ in the source of batches and in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from superstep.data.batch import Batch
from superstep.engine.engine import Engine, StepResult
from superstep.engine.instruction_timer import HostRecorder, Recorder
from superstep.engine.values.microbatch import microbatches_of
from superstep.errors import Fault
from superstep.launch.ranks import World
from superstep.numerics.objective import Objective
from superstep.numerics.sequence_losses import SequenceLossResult
from superstep.observe.jsonl import read
from superstep.plan.resolution.resolve import Resolved
from superstep.program.text import describe, write_program
from superstep.state.checkpoint_dirs import checkpoints, step_of
from superstep.state.manifest import Position
from superstep.state.tensor_piece import Kind
from superstep.train.lr_schedule import rate
from superstep.train.policy.gradient_recheck import RowsOf
from superstep.train.policy.step_policy import StepPolicy
from superstep.train.run_folder.run_paths import RunFolder, write_whole
from superstep.train.run_state import RunState, Texts
from superstep.train.save_schedule import SaveSchedule


class Trainer(RunState):
    """One rank's part of a trained model.

    Args:
        world: the launched ranks.
        run: the resolved run.
        engine: of this rank.
        folder: the run directory.
        identity: of the run, for checkpoints; empty where nothing resumes from them.
        files: texts of a checkpoint and of published weights, by name; rank 0's count.

    Attributes:
        policy: checks of a step.
        saves: the schedule of checkpoints.
    """

    def __init__(
        self, world: World, run: Resolved, engine: Engine, *, folder: RunFolder, identity: Texts, files: Texts
    ) -> None:
        super().__init__(world, run, engine, folder=folder, identity=identity, files=files)
        self.heart = world.heart
        self.policy = StepPolicy(run, engine, self.peers)
        self.saves = SaveSchedule(run.config.state.save_every, run.config.state.save_patience)
        self._device = world.device
        self._stop = world.stop
        self._record: Recorder = HostRecorder()

    @property
    def layers(self) -> str:
        """Implementations of this rank's layers."""
        return self._engine.layers

    def describe(self) -> None:
        """Write the program into the run directory."""
        write_whole(self.folder.program, write_program(self._engine.step_program))

    def read(self, place: Path, kinds: Sequence[Kind] | None = None) -> Position:
        self.policy.integrity.forget()
        return super().read(place, kinds)

    def restore(self, step: int) -> Position:
        self.policy.integrity.forget()
        return super().restore(step)

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

    def retry_step_s(self) -> float | None:
        """Seconds of a step, for the retry of a failed checkpoint; None: retry with the next regular one. Every rank
        calls this together.
        """
        return None

    def look_at_folder(self) -> None:
        """Request a stop after the step if the run directory was moved or removed."""
        if self.watch is not None and self.watch.look():
            self._stop.ask()
