"""Silent corruption: bits that are not what was computed, found before they are saved as good.

    step s                                  step s + 1
    ... update ─ check ──────────────────── at rest? ─ update ...
         │        │                          │          │
         │        copies on other ranks      │          each unit still has these sums when it is read
         │        have the same sums         nothing has written to the state since
         the sums of each unit, as it is written (``train.policy.state_sums``): the check finds them still

Ranks that hold the same part of a tensor compare the sums of its bits. Where they differ, most of them are right; where
there are two, the steps are done again, and the one that is farther from what comes out then was wrong. What one rank
alone holds can only be compared with its own sums: between two updates it changes where memory does, on that rank.
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
    differing,
    farthest,
    fingerprint_text,
    outvote,
    part_of,
    salts,
)
from superstep.state.tensor_piece import STATE, Kind, TensorPiece
from superstep.train.policy.state_sums import StateSums

KINDS: tuple[Kind, ...] = (*STATE, "gradient")
MOST_TIMES = 3
"""How often state is found corrupt before the run ends."""

How = Literal["majority", "replay", "at rest", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """State that is not what was computed.

    Attributes:
        step: the step after which it was found.
        what: the tensors, in words.
        ranks: those that were wrong; those that contradict each other, while that is not known.
        how: how it is known; None: it is to be found out by doing the steps again.
        elements: what the ranks hold.
    """

    step: int
    what: str
    ranks: tuple[int, ...]
    how: How | None
    elements: tuple[Element, ...] = ()


class Integrity:
    """One rank's.

    Args:
        every: steps between two checks; None makes none.
        engine: what holds the state.
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
        self._found: Corruption | None = None

    def begin(self, step: int) -> None:
        """The state after a step is taken for good, from where training goes on. Every rank calls this together."""
        self._passed.extend((step, step))
        if self.every is not None:
            self._look()
            self._own.take()

    def forget(self) -> None:
        """Another state is loaded: what was known of the one before says nothing of it."""
        if self._sums is not None:
            self._sums.forget()

    def watch(self, *, is_due: bool) -> None:
        """Before a step: whether the state after it is looked at."""
        if self._sums is not None:
            self._sums.is_wanted = is_due

    @property
    def aim(self) -> int:
        """The newest step of which no copy can have caught what was found: one before the last that was."""
        return self._passed[0]

    def note(self, corruption: Corruption) -> bool:
        """Take a finding in; whether the run may still be gone on with."""
        self._times += 1
        self._pending = corruption if corruption.how is None else None
        return self._times <= MOST_TIMES

    def is_due(self, step: int, *, is_saved: bool) -> bool:
        """Whether the state after a step is looked at: what will be saved always is."""
        return self.every is not None and (is_saved or step % self.every == 0)

    def resolved(self, step: int) -> Corruption | None:
        """What the steps, done again, say of an earlier finding, where they have come to it. Every rank calls this
        together.
        """
        pending = self._pending
        if pending is None or step != pending.step:
            return None
        self._pending = None
        held = {part_of(piece): piece for piece in self._look()}
        truth = [float(held[e.part].values[e.at]) if e.part in held else None for e in pending.elements]
        known = self._peers.gather(truth)
        right = [next(values[n] for values in known if values[n] is not None) for n in range(len(truth))]
        ranks = farthest(pending.elements, [value for value in right if value is not None])
        return Corruption(step=step, what=pending.what, ranks=ranks or pending.ranks, how="replay")

    def check(self, step: int) -> tuple[dict[Kind, str], Corruption | None]:
        """The fingerprint of each kind of state, and what is wrong, if anything. Every rank calls this together."""
        pieces = self._look()
        sums = bit_sums(pieces)
        device = self._engine.mesh.device.torch
        place = {part: number for number, part in enumerate(self._shared)}
        mine = [(number, part) for number, part in enumerate(map(part_of, pieces)) if part in place]

        def sent(numbers: Iterable[int]) -> torch.Tensor:
            return send(torch.tensor([*numbers], dtype=torch.int64), device)

        at = sent(number for number, _ in mine)
        slots = sent(place[part] for _, part in mine)
        count = sent(len(self._holders[part]) for _, part in mine)
        vector = torch.zeros(len(place) + len(KINDS), dtype=torch.int64, device=device)
        vector[slots] = sums[at]
        salted = sums * send(salts(pieces), device)
        for number, kind in enumerate(KINDS):
            of_kind = sent(n for n, piece in enumerate(pieces) if piece.kind == kind and piece.is_owner)
            vector[len(place) + number] = salted[of_kind].sum()
        summed = sum_over(vector, self._engine.mesh.world)
        prints = dict(zip(KINDS, map(fingerprint_text, summed[len(place) :].tolist()), strict=True))
        state = sums[: len(self._state)]
        wrong = self._find_changed(step, self._own.changed(state))
        if wrong is not None:
            return prints, wrong
        # Copies that are all alike sum to a multiple of each; 64 bits wrap around for both sides alike.
        is_wrong = (summed[slots] != count * sums[at]).any().to(torch.int64).view(1)
        if int(sum_over(is_wrong, self._engine.mesh.world)):
            return prints, self._suspect(step, pieces)
        self._passed.append(step)
        self._own.take(state)
        return prints, None

    def gradient(self) -> str:
        """The fingerprint of the gradient that the ranks have now. Every rank calls this together."""
        owned = [piece for piece in self._look() if piece.kind == "gradient" and piece.is_owner]
        device = self._engine.mesh.device.torch
        total = (bit_sums(owned).to(device) * salts(owned).to(device)).sum().view(1)
        return fingerprint_text(int(sum_over(total, self._engine.mesh.world)))

    def note_recomputed(self, corruption: Corruption) -> None:
        """That the gradient of the step to come is not what other ranks make of it."""
        self._found = corruption

    def at_rest(self, step: int) -> str:
        """Why the step to come may not be taken: the state has changed since it was checked after ``step``. Every rank
        calls this together.
        """
        if self._sums is None or not self._sums.are_known:
            return ""
        corruption = self._find_changed(step + 1, self._sums.changed(bit_sums(self._state)))
        if corruption is None:
            return ""
        self._found = corruption
        return f"{corruption.what} changed in the memory of {ranks_text(corruption.ranks)} since step {step}"

    def _find_changed(self, step: int, changed: torch.Tensor) -> Corruption | None:
        """Which ranks' state something else than an update has changed, up to or in a step. Every rank calls this
        together.

        Args:
            step: in which that is seen.
            changed: of each of this rank's pieces.
        """
        wrong = torch.zeros(self._peers.size, dtype=torch.int64, device=self._engine.mesh.device.torch)
        wrong[self._peers.rank] = changed.any()
        ranks = tuple(torch.nonzero(sum_over(wrong, self._engine.mesh.world)).flatten().tolist())
        if not ranks:
            return None
        pieces = zip(self._state, changed.tolist(), strict=True)
        named = [f"{piece.kind} of {piece.name}" for piece, is_so in pieces if is_so]
        what = _list_names([name for names in self._peers.gather(named) for name in names])
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
    def has_found(self) -> bool:
        """Whether the last step came upon something."""
        return self._found is not None

    def take(self) -> Corruption | None:
        """What ``at_rest`` has found; once."""
        corruption, self._found = self._found, None
        return corruption

    def hosts(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The hosts of ranks. Every rank calls this together."""
        every = self._peers.gather(platform.node())
        return tuple(every[rank] for rank in ranks)

    def _look(self) -> list[TensorPiece]:
        """This rank's pieces, the state first. Once, the ranks tell each other which parts they hold."""
        if not self._pieces:
            pieces = [*self._engine.pieces(STATE), *self._engine.pieces(("gradient",))]
            self._pieces = [piece for piece in pieces if piece.values.numel()]
            for rank, parts in enumerate(self._peers.gather([part_of(piece) for piece in self._pieces])):
                for part in parts:
                    self._holders.setdefault(part, []).append(rank)
            self._shared = sorted(part for part, ranks in self._holders.items() if len(ranks) > 1)
            if self.every is not None:
                self._sums = StateSums(self._state, self._engine.trained_buffers())
                self._engine.optimizer.watcher = self._sums
        return self._pieces

    def _suspect(self, step: int, pieces: Sequence[TensorPiece]) -> Corruption:
        """Which elements ranks hold with different bits, and which of them are outvoted."""
        held = {part: piece for piece in pieces if (part := part_of(piece)) in set(self._shared)}
        sums = self._peers.gather({part: block_sums(piece.values) for part, piece in held.items()})
        blocks = {part: differing({rank: sums[rank][part] for rank in self._holders[part]}) for part in self._shared}
        wanted = [(part, block) for part, changed in blocks.items() for block in changed][:MOST_ELEMENTS]
        bits = self._peers.gather({each: bits_of(held[each[0]].values, each[1]) for each in wanted if each[0] in held})
        elements: list[Element] = []
        for part, block in wanted:
            of_ranks = {rank: bits[rank][part, block] for rank in self._holders[part]}
            elements += (
                Element(part, BLOCK * block + at, {rank: each[at] for rank, each in of_ranks.items()})
                for at in differing(of_ranks)
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
    """Ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _list_names(names: Sequence[str]) -> str:
    """The first of some names, and how many others there are."""
    first, *others = dict.fromkeys(names)
    return f"{first} and {len(others)} other tensors" if others else first
