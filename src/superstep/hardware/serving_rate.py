"""ServingRate: what an engine step of a server was measured at, in one way of computing it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRate:
    """Seconds of each kind of work in an engine step: ``cost.serve`` has the kinds, and says how often a step has each.

    Attributes:
        way: number format and what is special: bf16, bf16-exact, bf16-w8a8, ...
        tp: ranks that shared the model.
        block_keys: texts were read together whose keys are as many blocks of so many.
        is_paged: whether a row that is alone in its text was read in its pages.
        leaves_rows: whether only rows whose logits are wanted went on behind the last layer's keys.
        term_s: seconds of each kind.
        held_bytes: of a rank's memory, for each weight of a linear: more than one copy may be kept.
        beside_bytes: what a rank's process takes beside weights and keys.
        spread: how far a measured step was from what these seconds say, in the median, as a share.
    """

    way: str
    tp: int
    block_keys: int
    is_paged: bool
    leaves_rows: bool = False
    term_s: tuple[tuple[str, float], ...] = ()
    held_bytes: float
    beside_bytes: float
    spread: float
