"""Losses of whole sequences, in two passes: log-probabilities first, then a weighted sum over tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from superstep.data.batch import Batch, SplitName
from superstep.data.sources.source import DataStream
from superstep.numerics.sequence_losses import SequenceLossResult
from superstep.plan.resolution.resolve import Resolved
from superstep.state.all_or_none import Peers


class CurrentModel(Protocol):
    """The current model on this rank of a run."""

    @property
    def run(self) -> Resolved: ...

    @property
    def rows(self) -> slice:
        """Rows of a global batch that this rank reads."""
        ...

    @property
    def peers(self) -> Peers: ...

    @property
    def corpus(self) -> Path: ...

    def logprobs(self, batch: Batch) -> Tensor:
        """The log-probability of each target of a whole global batch; each rank passes its rows."""
        ...


class SequenceLoss(Protocol):
    """A loss of whole sequences (``numerics/sequence_losses.py``)."""

    def stream(self, stream: DataStream, corpus: Path, split: SplitName) -> DataStream:
        """Batches with the inputs of ``weigh``; their divisor is that of the loss."""
        ...

    def weigh(self, batch: Batch, logp: Tensor) -> SequenceLossResult:
        """The loss of a global batch, and the weight of each target in the second pass.

        Args:
            batch: rows of a batch of ``stream``.
            logp: of all targets of the global batch.
        """
        ...

    def remember(self, pupil: CurrentModel) -> None:
        """Save results of the initial weights. Every rank calls this together."""
        ...

    def is_remembered(self, pupil: CurrentModel) -> bool:
        """Whether they are saved. Every rank calls this together."""
        ...


def weigh(loss: SequenceLoss, pupil: CurrentModel, batch: Batch) -> tuple[Batch, SequenceLossResult]:
    """The batch with the current weights of its targets, and the loss."""
    weighed = loss.weigh(batch, pupil.logprobs(batch))
    mine = weighed.weights[pupil.rows].to(batch.targets_BS.device)
    return replace(batch, streams={**batch.streams, "weights": mine}), weighed
