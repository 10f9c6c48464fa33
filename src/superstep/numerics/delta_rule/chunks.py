"""The chunks of a sequence in linear attention: runs of tokens of one document, from its start.

A piece is a run of tokens that share a state: a document, or the part of it that a rank holds. Its first chunk starts
with it, so that a document has the same chunks wherever it lies. Pieces are sorted by their number of chunks, the
longest first: then the pieces that have an n-th chunk come first, and these chunks lie side by side.

    B  rows    S  positions    M  chunks    C  tokens of a chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.numerics.sending import send
from superstep.plan.model.attention_rule import DELTA_CHUNK


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``first`` to ``end`` of a row."""

    row: int
    first: int
    end: int

    @property
    def chunks(self) -> int:
        return -(-(self.end - self.first) // DELTA_CHUNK)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of pieces.

    Attributes:
        pieces: in the order of the states.
        places: [M, C], the place of each token in rows side by side; beyond the last one where a chunk is not full.
        counts: for each n, how many pieces have an n-th chunk.
    """

    pieces: tuple[Piece, ...]
    places: Tensor
    counts: tuple[int, ...]

    @property
    def steps(self) -> list[slice]:
        """The n-th chunks of all pieces."""
        ends = [sum(self.counts[: n + 1]) for n in range(len(self.counts))]
        return [slice(end - count, end) for count, end in zip(self.counts, ends, strict=True)]

    def split(self, x_BSX: Tensor) -> Tensor:
        """The tokens by chunk, [M, C, ...]; zeros where a chunk is not full."""
        rows = x_BSX.flatten(0, 1)
        spare = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
        out: Tensor = spare.index_select(0, self.places.flatten()).unflatten(0, self.places.shape)
        return out

    def put(self, x_MCX: Tensor, into: Tensor) -> None:
        """The inverse: write the tokens into ``room``."""
        into.index_copy_(0, self.places.flatten(), x_MCX.flatten(0, 1).to(into.dtype))


def make_room(like_BSX: Tensor) -> Tensor:
    """Room for the tokens of rows side by side, and for one that is not there: [B · S + 1, ...]."""
    B, S = like_BSX.shape[:2]
    return like_BSX.new_empty(B * S + 1, *like_BSX.shape[2:])


def take_rows(room: Tensor, like_BSX: Tensor) -> Tensor:
    """The rows that were put into a room: [B, S, ...]."""
    rows: Tensor = room[:-1].view(like_BSX.shape)
    return rows


def list_chunks(pieces: Sequence[Piece], tokens: int, beyond: int, device: torch.device) -> Chunks:
    """The chunks of pieces of rows with ``tokens`` tokens; ``beyond`` is the place of a token that is not there."""
    ordered = tuple(sorted(pieces, key=lambda piece: -piece.chunks))
    longest = ordered[0].chunks
    counts = tuple(sum(piece.chunks > n for piece in ordered) for n in range(longest))
    starts, ends = [], []
    for n, count in enumerate(counts):
        for piece in ordered[:count]:
            starts.append(piece.row * tokens + piece.first + n * DELTA_CHUNK)
            ends.append(piece.row * tokens + piece.end)
    places = torch.tensor(starts)[:, None] + torch.arange(DELTA_CHUNK)
    places = places.where(places < torch.tensor(ends)[:, None], beyond)
    return Chunks(ordered, send(places, device), counts)


def group_pieces(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """Pieces in groups of at most ``most`` chunks, or of one piece: many short documents take no more memory at once
    than a long one, though each has a chunk of its own.
    """
    groups: list[list[Piece]] = []
    count = most
    for piece in sorted(pieces, key=lambda piece: -piece.chunks):
        if count + piece.chunks > most:
            groups.append([])
            count = 0
        groups[-1].append(piece)
        count += piece.chunks
    return groups


def find_pieces(starts: Tensor | None, rows: int, tokens: int) -> list[Piece]:
    """The documents of whole rows.

    Args:
        starts: int64 [B, S], the start of each token's document within the row; None for one document in each row.
        rows: B.
        tokens: S.
    """
    if starts is None:
        return [Piece(row, 0, tokens) for row in range(rows)]
    pieces = []
    for row, own in enumerate(starts.tolist()):
        firsts = sorted(set(own))
        pieces += [Piece(row, first, end) for first, end in zip(firsts, [*firsts[1:], tokens], strict=True)]
    return pieces
