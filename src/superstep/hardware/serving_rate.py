"""ServingRate: the measured rate of a server's engine step, in one way of computing it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRate:
    """Seconds of each kind of work in an engine step; ``cost.serve`` has the kinds and counts them in a step.

    Attributes:
        way: number format and variant: bf16, bf16-exact, bf16-w8a8, ...
        tp: ranks that shared the model.
        block_keys: texts whose keys fill the same number of blocks of this size were read together.
        is_paged: whether a row that is alone in its text was read in its pages.
        leaves_rows: whether only rows with wanted logits went on after the last layer's keys.
        held_bytes: of a rank's memory, for each weight of a linear: more than one copy may be kept.
        beside_bytes: a rank's process without weights and keys.
        spread: the median error of these seconds for a measured step, as a share.
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
