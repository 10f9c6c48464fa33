"""Rules: which mesh axis each logical axis of a parameter is cut over, as GSPMD does by annotation (Xu 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cut = Literal["tp", "ep"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Logical axis to mesh axis; an axis without a rule is whole on every rank."""

    cuts: tuple[tuple[str, Cut], ...]

    def cut(self, axis: str | None) -> Cut | None:
        """The mesh axis that cuts a logical axis, if one does."""
        return next((cut for name, cut in self.cuts if name == axis), None)


DEFAULT = Rules((("vocab", "tp"), ("heads", "tp"), ("kv_heads", "tp"), ("ffn", "tp"), ("experts", "ep")))
"""Megatron-LM's cuts (Shoeybi 2019), and GShard's of the experts (Lepikhin 2020)."""
