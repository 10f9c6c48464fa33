"""Initial values from a folder of weights: each rank reads only its own parts.

Of a tensor that is cut over tp and ZeRO::

    stored [6, 4]      a piece's block: columns 2 and 3; its values: elements 5 to 8 of that block
    . . a b
    . . c d            rows 2 to 4 of the block contain them: these are read, and the ends cut off
    . . e f  <-  5
    . . g h  <-  6 7
    . . i j  <-  8
    . . k l
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from superstep.errors import StateError, SuperstepError
from superstep.model.files.hf import HfTensor, check_weights, open_weights
from superstep.state.all_or_none import Peers, together
from superstep.state.tensor_piece import TensorPiece

MOST_ELEMENTS = 1 << 24
"""Elements of a tensor that are read at once, approximately."""


def fill(folder: Path, pieces: Iterable[TensorPiece], shapes: Mapping[str, Sequence[int]], peers: Peers) -> None:
    """Fill this rank's pieces from a Hugging Face folder, or a checkpoint. Every rank calls this together.

    Args:
        folder: of the weights; values of any floating dtype become fp32.
        pieces: this rank's weights.
        shapes: of every global tensor of the model.
        peers: the ranks.

    Raises:
        StateError: the weights are missing, or belong to another model: on every rank the same. Nothing has been filled
            if tensors are missing, surplus or of another shape.
    """

    def unreadable(error: Exception) -> SuperstepError:
        return StateError(f"{folder} cannot be read ({error}); fetch or save it again.")

    def check() -> None:
        if peers.rank == 0:
            check_weights(open_weights(folder), shapes)

    def read() -> None:
        weights = open_weights(folder)
        for piece in pieces:
            if piece.values.numel():
                _read(weights[piece.name], piece, folder)

    together(peers, check, unreadable)
    together(peers, read, unreadable)


@torch.no_grad()
def _read(stored: HfTensor, piece: TensorPiece, folder: Path) -> None:
    block = [cut.indices(size)[:2] for cut, size in zip(piece.index, piece.shape, strict=True)]
    if not block:
        piece.values.copy_(stored[:].reshape(1))
        return
    (first, _), *others = block
    row = math.prod(stop - start for start, stop in others)
    high = piece.low + piece.values.numel()
    rows_at_once = max(1, MOST_ELEMENTS // row)
    for begin in range(piece.low // row, -(-high // row), rows_at_once):
        end = min(begin + rows_at_once, -(-high // row))
        values = stored[(slice(first + begin, first + end), *piece.index[1:])]
        if not values.is_floating_point():
            raise StateError(f"{folder}: {piece.name} is stored as {values.dtype}; save the weights as fp32 or bf16.")
        low, stop = max(piece.low, begin * row), min(high, end * row)
        part = values.flatten()[low - begin * row : stop - begin * row]
        piece.values[low - piece.low : stop - piece.low].copy_(part)
