"""Silent corruption: state with bits that were not computed, detected before it is saved.

    step s                                  step s + 1
    ... update ─ check ──────────────────── at rest? ─ update ...
         │        │                          │          │
         │        copies on other ranks      │          each unit still has these sums when it is read
         │        have the same sums         nothing has written to the state since
         the sums of each unit, as it is written (``train.policy.state_sums``): the check compares them

Ranks that hold the same part of a tensor compare the sums of its bits. Where they differ, the majority is right; with
two ranks the steps are computed again, and the rank that is farther from the result was wrong. State without a copy on
another rank can only be compared with its own sums: if it changes between two updates, that rank's memory is at fault.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from superstep.comm.collectives import sum_over
from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine
from superstep.numerics.sending import send
from superstep.state.fingerprint import (
    BLOCK,
    MOST_ELEMENTS,
    Element,
    TensorPart,
    bit_sums,
    bits_of,
    block_sums,
    differing_indices,
    farthest,
    fingerprint_text,
    outvote,
    part_of,
    salts,
)
from superstep.state.tensor_piece import Kind, TensorPiece
from superstep.train.policy.state_sums import StateSums

MOST_TIMES = 3
"""Corrupt states after which the run ends."""

How = Literal["majority", "replay", "at rest", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """Corrupt state.

    Attributes:
        step: the step after which it was detected.
        what: the tensors, in words.
        ranks: those that were wrong; while that is unknown, those that differ.
        how: how this was decided; None: the steps are to be computed again.
        elements: values on the ranks.
    """

    step: int
    what: str
    ranks: tuple[int, ...]
    how: How | None
    elements: tuple[Element, ...] = ()


class Integrity:
    """Integrity checks of one rank.

    Args:
        every: steps between two checks; None disables them.
        engine: holds the state.
        peers: the ranks.
    """

    def __init__(self, every: int | None, engine: Engine, peers: RankPeers) -> None:
        self.every = every
        self._engine = engine
        self._peers = peers
        self._pieces: list[TensorPiece] = []
        self._shared: list[TensorPart] = []
        self._holders: dict[TensorPart, list[int]] = {}
        self._sums: StateSums | None = None
        self._passed: deque[int] = deque((0, 0), maxlen=2)
        self._pending: Corruption | None = None
        self._times = 0
        self._corruption: Corruption | None = None

    def begin(self, step: int) -> None:
        """Accept the state after a step as correct; training continues from it. Every rank calls this together."""
        self._passed.extend((step, step))
        if self.every is not None:
            self._look()
            self._own.take()

    def forget(self) -> None:
        """Drop the sums, because another state is loaded."""
        if self._sums is not None:
            self._sums.forget()

    def watch(self, *, is_due: bool) -> None:
        """Before a step: set whether the state after it is checked."""
        if self._sums is not None:
            self._sums.is_wanted = is_due

    @property
    def aim(self) -> int:
        """The newest step with copies that predate the detected corruption: the check before the last one."""
        return self._passed[0]

    def note(self, corruption: Corruption) -> bool:
        """Record a corruption; False if the run must end."""
        self._times += 1
        self._pending = corruption if corruption.how is None else None
        return self._times <= MOST_TIMES

    def is_due(self, step: int, *, is_saved: bool) -> bool:
        """Whether the state after a step is checked; always before it is saved."""
        return self.every is not None and (is_saved or step % self.every == 0)

    def decide(self, step: int) -> Corruption | None:
        """Decide an earlier corruption from recomputed steps, once they reach its step. Every rank calls
        this together.
        """
        pending = self._pending
        if pending is None or step != pending.step:
            return None
        self._pending = None
        held = {part_of(piece): piece for piece in self._look()}
        truth = [float(held[e.part].values[e.index]) if e.part in held else None for e in pending.elements]
        known = self._peers.gather(truth, list[float | None])
        right = [next(values[n] for values in known if values[n] is not None) for n in range(len(truth))]
        ranks = farthest(pending.elements, [value for value in right if value is not None])
        return Corruption(step=step, what=pending.what, ranks=ranks or pending.ranks, how="replay")

    def check(self, step: int) -> tuple[dict[Kind, str], Corruption | None]:
        """The fingerprint of each kind of state, and the corruption, if any. Every rank calls this together."""
        pieces = self._look()
        sums = bit_sums(pieces)
        device = self._engine.mesh.device.torch
        place = {part: number for number, part in enumerate(self._shared)}
        mine = [(number, part) for number, part in enumerate(map(part_of, pieces)) if part in place]

        def as_tensor(numbers: Iterable[int]) -> torch.Tensor:
            return send(torch.tensor([*numbers], dtype=torch.int64), device)

        at = as_tensor(number for number, _ in mine)
        slots = as_tensor(place[part] for _, part in mine)
        count = as_tensor(len(self._holders[part]) for _, part in mine)
        kinds: tuple[Kind, ...] = (*self._engine.state_kinds, "gradient")
        vector = torch.zeros(len(place) + len(kinds), dtype=torch.int64, device=device)
        vector[slots] = sums[at]
        salted = sums * send(salts(pieces), device)
        for number, kind in enumerate(kinds):
            of_kind = as_tensor(n for n, piece in enumerate(pieces) if piece.kind == kind and piece.is_owner)
            vector[len(place) + number] = salted[of_kind].sum()
        summed = sum_over(vector, self._engine.mesh.world)
        prints = dict(zip(kinds, map(fingerprint_text, summed[len(place) :].tolist()), strict=True))
        state = sums[: len(self._state)]
        wrong = self._find_changed(step, self._own.find_changed(state))
        if wrong is not None:
            return prints, wrong
        # Equal copies sum to a multiple of each; 64-bit overflow is the same on both sides.
        is_wrong = (summed[slots] != count * sums[at]).any().to(torch.int64).view(1)
        if int(sum_over(is_wrong, self._engine.mesh.world)):
            return prints, self._suspect(step, pieces)
        self._passed.append(step)
        self._own.take(state)
        return prints, None

    def gradient(self) -> str:
        """The fingerprint of the ranks' current gradient. Every rank calls this together."""
        owned = [piece for piece in self._look() if piece.kind == "gradient" and piece.is_owner]
        device = self._engine.mesh.device.torch
        total = (bit_sums(owned).to(device) * salts(owned).to(device)).sum().view(1)
        return fingerprint_text(int(sum_over(total, self._engine.mesh.world)))

    def note_recomputed(self, corruption: Corruption) -> None:
        """Record that the gradient of the next step differs from other ranks'."""
        self._corruption = corruption

    def at_rest(self, step: int) -> str:
        """Why the next step must not run: the state has changed since its check after ``step``; empty if it has not.
        Every rank calls this together.
        """
        if self._sums is None or not self._sums.are_known:
            return ""
        corruption = self._find_changed(step + 1, self._sums.find_changed(bit_sums(self._state)))
        if corruption is None:
            return ""
        self._corruption = corruption
        return f"{corruption.what} changed in the memory of {ranks_text(corruption.ranks)} since step {step}"

    def _find_changed(self, step: int, changed: torch.Tensor) -> Corruption | None:
        """Ranks with state that changed outside of an update, up to or in a step. Every rank calls this together.

        Args:
            step: the step of the check.
            changed: for each of this rank's pieces.
        """
        wrong = torch.zeros(self._peers.size, dtype=torch.int64, device=self._engine.mesh.device.torch)
        wrong[self._peers.rank] = changed.any()
        ranks = tuple(torch.nonzero(sum_over(wrong, self._engine.mesh.world)).flatten().tolist())
        if not ranks:
            return None
        pieces = zip(self._state, changed.tolist(), strict=True)
        named = [f"{piece.kind} of {piece.name}" for piece, is_so in pieces if is_so]
        what = _list_names([name for names in self._peers.gather(named, list[str]) for name in names])
        self._own.forget()
        return Corruption(step=step, what=what, ranks=ranks, how="at rest")

    @property
    def _state(self) -> list[TensorPiece]:
        return [piece for piece in self._pieces if piece.kind != "gradient"]

    @property
    def _own(self) -> StateSums:
        assert self._sums is not None, "looked for with the pieces"
        return self._sums

    @property
    def has_detected(self) -> bool:
        """Whether the last step detected a corruption."""
        return self._corruption is not None

    def take(self) -> Corruption | None:
        """The corruption that ``at_rest`` detected; returned once."""
        corruption, self._corruption = self._corruption, None
        return corruption

    def hosts(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Host names of ranks. Every rank calls this together."""
        every = self._peers.gather(platform.node(), str)
        return tuple(every[rank] for rank in ranks)

    def _look(self) -> list[TensorPiece]:
        """This rank's pieces, the state first. The first call exchanges between ranks which parts they hold."""
        if not self._pieces:
            pieces = [*self._engine.list_trained_pieces(), *self._engine.pieces(("gradient",))]
            self._pieces = [piece for piece in pieces if piece.values.numel()]
            mine = [part_of(piece) for piece in self._pieces]
            for rank, parts in enumerate(self._peers.gather(mine, list[TensorPart])):
                for part in parts:
                    self._holders.setdefault(part, []).append(rank)
            self._shared = sorted(part for part, ranks in self._holders.items() if len(ranks) > 1)
            if self.every is not None:
                self._sums = StateSums(self._state, self._engine.list_trained_buffers())
                self._engine.optimizer.watcher = self._sums
        return self._pieces

    def _suspect(self, step: int, pieces: Sequence[TensorPiece]) -> Corruption:
        """Elements in which ranks differ, and the outvoted ranks."""
        held = {part: piece for piece in pieces if (part := part_of(piece)) in set(self._shared)}
        of_blocks = {part: block_sums(piece.values) for part, piece in held.items()}
        sums = self._peers.gather(of_blocks, dict[TensorPart, list[int]])
        blocks = {
            part: differing_indices({rank: sums[rank][part] for rank in self._holders[part]}) for part in self._shared
        }
        wanted = [(part, block) for part, changed in blocks.items() for block in changed][:MOST_ELEMENTS]
        mine = {each: bits_of(held[each[0]].values, each[1]) for each in wanted if each[0] in held}
        bits = self._peers.gather(mine, dict[tuple[TensorPart, int], list[int]])
        elements: list[Element] = []
        for part, block in wanted:
            of_ranks = {rank: bits[rank][part, block] for rank in self._holders[part]}
            elements += (
                Element(part, BLOCK * block + index, {rank: words[index] for rank, words in of_ranks.items()})
                for index in differing_indices(of_ranks)
            )
        elements = elements[:MOST_ELEMENTS]
        wrong = outvote(elements)
        ranks = tuple(sorted({rank for element in elements for rank in element.bits}))
        return Corruption(
            step=step,
            what=_list_names([element.describe() for element in elements]),
            ranks=ranks if wrong is None else wrong,
            how=None if wrong is None else "majority",
            elements=tuple(elements),
        )


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _list_names(names: Sequence[str]) -> str:
    """The first of some names, and the number of the others."""
    first, *others = dict.fromkeys(names)
    return f"{first} and {len(others)} other tensors" if others else first
