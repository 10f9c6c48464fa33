"""Direct preference optimisation: make the better of two answers to a prompt likelier, relative to a reference.

The reference is the run's initial model. Its log-probabilities are computed once, before the first step, and stored
beside the tokens: one fp32 for each place of each sequence, so that no second model is in memory.

    tokens ──► logprobs of the start ──► train.reference       once
    batch  ──► logprobs now ──► dpo(now, reference) ──► weights ──► a step of weighted cross entropy
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superstep.data.batch import SPLITS, Batch, SplitName
from superstep.data.preparation.prepare import stamp
from superstep.data.sources.source import DataStream
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import TokenStream, stream_of
from superstep.errors import DataError, Fault
from superstep.numerics.sequence_losses import SequenceLossResult, dpo
from superstep.state.all_or_none import together
from superstep.state.fsync import sync, write_text
from superstep.train.policy.sequence_loss import CurrentModel
from superstep.tune.config import DpoConfig

MARK = "reference.json"
"""Names the weights of the references beside it; written last."""


@dataclass(frozen=True, slots=True)
class PairBatch(Batch):
    """Rows of a global batch of preferences, with inputs of the loss for all its rows.

    Attributes:
        owners_BS: the answer of each target of the whole global batch: 2 i the chosen one of pair i, 2 i + 1 the
            rejected one, -1 none.
        reference_BS: the initial log-probabilities of the same targets.
        pairs: in the whole global batch.
    """

    owners_BS: Tensor | None = None  # noqa: N815 - the suffix names the dims
    reference_BS: Tensor | None = None  # noqa: N815
    pairs: int = 0


def make_dpo(config: DpoConfig) -> Dpo:
    """The loss of a recipe."""
    return Dpo(beta=config.beta, label_smoothing=config.label_smoothing)


class PairStream:
    """A stream of conversations in pairs.

    Args:
        stream: of them.
        path: of the reference of its split; needed from the first batch on.
    """

    def __init__(self, stream: TokenStream, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._reference: np.memmap[tuple[int, int], np.dtype[np.float32]] | None = None

    @property
    def sequences(self) -> int:
        """Number of distinct sequences."""
        return self._stream.sequences

    @property
    def batch_sequences(self) -> int:
        """Sequences of a global batch."""
        return self._stream.batch_sequences

    def batch(self, sample: int, rows: slice) -> PairBatch:
        """Rows of the global batch at cursor ``sample``."""
        if self._reference is None:
            shape = (self._stream.sequences, self._stream.sequence_tokens)
            self._reference = np.memmap(self._path, np.float32, "r", shape=shape)
        plain = self._stream.batch(sample, rows)
        owners_BS, conversations = self._stream.owners(sample)
        assert conversations % 2 == 0, "chosen and rejected lie side by side"
        given = {each.name: getattr(plain, each.name) for each in fields(Batch)} | {
            "divisor": float(conversations // 2)
        }
        reference_BS = torch.from_numpy(self._reference[self._stream.numbers(sample)])
        return PairBatch(**given, owners_BS=owners_BS, reference_BS=reference_BS, pairs=conversations // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    """The loss of preferences.

    Attributes:
        beta: how close the model stays to the reference.
        label_smoothing: the share of preferences that may be wrong.
    """

    beta: float
    label_smoothing: float

    def stream(self, stream: DataStream, corpus: Path, split: SplitName) -> PairStream:
        """Batches of pairs."""
        assert isinstance(stream, TokenStream), "preferences are tokens"
        return PairStream(stream, _place(corpus, split))

    def weigh(self, batch: Batch, logp: Tensor) -> SequenceLossResult:
        """The loss of a global batch, and the weight of each target in the second pass."""
        assert isinstance(batch, PairBatch)
        assert batch.owners_BS is not None
        assert batch.reference_BS is not None
        return dpo(
            logp,
            batch.reference_BS,
            batch.owners_BS,
            batch.pairs,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
        )

    def is_remembered(self, pupil: CurrentModel) -> bool:
        """Whether the references belong to the run's initial weights. Every rank calls this together."""

        def look() -> bool:
            try:
                mark = json.loads((pupil.corpus / MARK).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return False
            wanted = _mark(pupil)
            # A resumed run does not need its initial weights.
            return bool({**wanted, "weights": wanted["weights"] or mark.get("weights")} == mark)

        return together(pupil.peers, lambda: look() if pupil.peers.rank == 0 else False, _unreadable, bool)[0]

    def remember(self, pupil: CurrentModel) -> None:
        """Compute the references, unless they exist. Every rank calls this together."""
        if self.is_remembered(pupil):
            return
        # Until both splits are complete, the folder must not name their weights.
        forget = partial((pupil.corpus / MARK).unlink, missing_ok=True)
        together(pupil.peers, forget if pupil.peers.rank == 0 else _nothing, _unwritable)
        corpus = open_corpus(pupil.corpus)
        for split in SPLITS:
            _write_reference(pupil, stream_of(pupil.run.config, corpus, split), _place(pupil.corpus, split))

        def mark() -> None:
            if pupil.peers.rank == 0:
                write_text(pupil.corpus / MARK, json.dumps(_mark(pupil), indent=1) + "\n")

        together(pupil.peers, mark, _unwritable)


def _place(corpus: Path, split: SplitName) -> Path:
    return corpus / f"{split}.reference"


def _write_reference(pupil: CurrentModel, stream: TokenStream, path: Path) -> None:
    """Compute the references of a split. Rank 0 writes a temporary file and renames it: readers with the old file open
    are not affected.
    """
    beside = path.with_name(path.name + ".partial")
    is_writing = pupil.peers.rank == 0
    row_bytes = 4 * stream.sequence_tokens

    def put(numbers: NDArray[np.int64], logp_BS: Tensor) -> None:
        with beside.open("r+b" if beside.exists() else "w+b") as file:
            for number, row in zip(numbers.tolist(), logp_BS.cpu().numpy(), strict=True):
                file.seek(number * row_bytes)
                file.write(row.astype("<f4").tobytes())

    def finish() -> None:
        sync(beside)
        beside.replace(path)

    together(pupil.peers, lambda: beside.unlink(missing_ok=True) if is_writing else None, _unwritable)
    for sample in range(0, stream.sequences, stream.batch_sequences):
        logp_BS = pupil.logprobs(stream.batch(sample, pupil.rows))
        numbers = stream.numbers(sample)
        together(pupil.peers, partial(put, numbers, logp_BS) if is_writing else _nothing, _unwritable)
    together(pupil.peers, finish if is_writing else _nothing, _unwritable)


def _nothing() -> None:
    pass


def _mark(pupil: CurrentModel) -> dict[str, Any]:
    """Inputs of the references: the tokens, the initial weights, and the numerics of log-probabilities."""
    config = pupil.run.config
    weights = sorted(Path(str(config.model.weights)).glob("*.safetensors"))
    return {
        "tokens": open_corpus(pupil.corpus).manifest.fingerprint,
        "weights": [list(stamp(path)) for path in weights if "optimizer" not in path.name],
        "numerics": asdict(config.numerics),
    }


def _unreadable(error: Exception) -> DataError:
    return DataError(f"the references of the preferences cannot be read ({error}); delete {MARK} beside the tokens.")


def _unwritable(error: Exception) -> Fault:
    return Fault(f"the references of the preferences cannot be written beside the tokens: {error}.")
