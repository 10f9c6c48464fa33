"""What is learnt of a batch, where that is no sum over its tokens: a loss of whole answers, in two passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from superstep.data.token_files import SplitName
from superstep.data.token_stream import Batch, BatchSource, TokenStream
from superstep.numerics.sequence_losses import SequenceLossResult
from superstep.plan.resolution.resolve import Resolved
from superstep.state.all_or_none import Peers


class Epochs(BatchSource, Protocol):
    """Global batches, of so many distinct sequences."""

    @property
    def sequences(self) -> int: ...


class CurrentModel(Protocol):
    """The model as it is now, on this rank of a run."""

    @property
    def run(self) -> Resolved:
        """The run."""
        ...

    @property
    def rows(self) -> slice:
        """The rows of a global batch that this rank reads."""
        ...

    @property
    def peers(self) -> Peers:
        """The ranks of the run."""
        ...

    @property
    def corpus(self) -> Path:
        """The folder of token files."""
        ...

    def logprobs(self, batch: Batch) -> Tensor:
        """The log-probability of each target of a whole global batch, of which each rank gives its rows."""
        ...


class SequenceLoss(Protocol):
    """A loss that looks at whole answers (``numerics/sequence_losses.py``)."""

    def stream(self, stream: TokenStream, corpus: Path, split: SplitName) -> Epochs:
        """Batches with what ``weigh`` needs of them; their divisor is that of the loss."""
        ...

    def weigh(self, batch: Batch, logp: Tensor) -> SequenceLossResult:
        """The loss of a global batch, and the weight of each target in the second pass.

        Args:
            batch: some rows of one, out of ``stream``.
            logp: of all targets of the global batch.
        """
        ...

    def remember(self, pupil: CurrentModel) -> None:
        """Keep what is to be known of the weights that the run begins with. Every rank calls this together."""
        ...

    def is_remembered(self, pupil: CurrentModel) -> bool:
        """Whether that is known. Every rank calls this together."""
        ...


def weigh(loss: SequenceLoss, pupil: CurrentModel, batch: Batch) -> tuple[Batch, SequenceLossResult]:
    """A batch with the weights that its targets have now, and what the lesson's loss comes to."""
    weighed = loss.weigh(batch, pupil.logprobs(batch))
    mine = weighed.weights[pupil.rows].to(batch.tokens_BS.device)
    return replace(batch, streams={**batch.streams, "weights": mine}), weighed
