"""A model whose keys are the tokens themselves: what it says at a position it reads from the pages of that text."""

from __future__ import annotations

import torch

from superstep.serve.compute.flat_batch import Rows

V = 20
SIZE = 4
"""Positions of a page."""


class PagedToy:
    """The last two tokens decide what is likely, all of the text the rest: so a wrong key anywhere shows in the bits.

    Args:
        pages: that there are.
        vocab: tokens.
        sharpness: how far the last two tokens decide.
        whole: how far all of the text does.

    Attributes:
        steps: of each call, the tokens of its rows.
    """

    def __init__(self, pages: int, *, vocab: int = V, sharpness: float = 3.0, whole: float = 0.1) -> None:
        noise = torch.Generator().manual_seed(0)
        self.slots = [-1] * (pages * SIZE)
        self.likely = torch.randn(V * V, vocab, generator=noise) * sharpness
        self.rest = torch.randn(97, vocab, generator=noise) * whole
        self.steps: list[tuple[int, ...]] = []

    def __call__(self, rows: Rows) -> torch.Tensor:
        """The logits of the wanted rows. Keys are written before any is read, as attention does."""
        self.steps.append(rows.tokens)
        places = [
            [part.pages[at // SIZE] * SIZE + at % SIZE for at in range(place + 1)]
            for part in rows.parts
            for place in range(part.first, part.first + part.count)
        ]
        for token, slots in zip(rows.tokens, places, strict=True):
            self.slots[slots[-1]] = token
        vocab = self.likely.shape[1]
        logits = torch.empty(len(rows.wanted), vocab)
        for row, at in enumerate(rows.wanted):
            text = [self.slots[slot] for slot in places[at]]
            last = text[-2] if len(text) > 1 else 0
            whole = 0
            for token in text:
                whole = (whole * 31 + token + 1) % 97
            logits[row] = self.likely[(last * vocab + text[-1]) % len(self.likely)] + self.rest[whole]
        return logits

    def totals(self, logits: torch.Tensor) -> torch.Tensor:
        """Row by row: how a row is rounded must not depend on those beside it."""
        tops = [(row, float(row.max()), int(row.argmax())) for row in logits]
        found = [(top, float((row - top).double().exp().sum().log()), at) for row, top, at in tops]
        return torch.tensor(found, dtype=torch.float64).view(-1, 3)

    def wait(self) -> None:
        """Nobody waits."""

    def end(self) -> None:
        """Nobody is left."""
