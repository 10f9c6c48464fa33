"""Base weights of adapters in blocks: read from a folder, packed, and cut.

A rank reads each of its matrices whole, as the scales of the blocks are counted from the start of the whole, and keeps
its part of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from superstep.engine.flat.rank_state import PackedPiece
from superstep.errors import StateError, SuperstepError
from superstep.kernels.packed.pack import pack
from superstep.model.files.hf import open_weights
from superstep.state.all_or_none import Peers, together


def fill_packed(folder: Path, pieces: Iterable[PackedPiece], peers: Peers) -> None:
    """Fill this rank's bytes of matrices in blocks. Every rank calls this together.

    Raises:
        StateError: the weights cannot be read: on every rank the same.
    """

    def unreadable(error: Exception) -> SuperstepError:
        return StateError(f"{folder} cannot be read ({error}); fetch or save it again.")

    together(peers, lambda: _fill(folder, pieces), unreadable)


@torch.no_grad()
def _fill(folder: Path, pieces: Iterable[PackedPiece]) -> None:
    weights = open_weights(folder)
    by_matrix: dict[str, list[PackedPiece]] = {}
    for piece in pieces:
        assert piece.slot.spec.packed is not None
        by_matrix.setdefault(piece.slot.spec.packed.matrix, []).append(piece)
    for name, its_pieces in by_matrix.items():
        part = its_pieces[0].slot.spec.packed
        assert part is not None
        made = pack(weights[name][:].to(its_pieces[0].values.device), part.block_format)
        for piece in its_pieces:
            assert piece.slot.spec.packed is not None
            values = piece.slot.take(made[piece.slot.spec.packed.is_scales])
            piece.values.copy_(values.flatten()[piece.low : piece.high])
