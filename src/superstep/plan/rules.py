"""Rules: the mesh axis that cuts each logical axis of a parameter, as GSPMD does by annotation (Xu 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from superstep.plan.config import Rule

Cut = Literal["tp", "ep"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Logical axis to mesh axis; an axis without a rule is whole on every rank."""

    cuts: tuple[tuple[str, Cut], ...]

    def cut(self, axis: str | None) -> Cut | None:
        """The mesh axis that cuts a logical axis, if any."""
        return next((cut for name, cut in self.cuts if name == axis), None)

    def cuts_any(self, axes: Iterable[str | None]) -> bool:
        """Whether one of a parameter's axes is cut."""
        return any(self.cut(axis) for axis in axes)

    def over(self, table: Iterable[tuple[str, Rule]]) -> Rules:
        """These rules, with a plan's rules replacing some."""
        rules: dict[str, Rule] = {**dict(self.cuts), **dict(table)}
        return Rules(tuple((axis, rule) for axis, rule in rules.items() if rule != "none"))


DEFAULT = Rules((("vocab", "tp"), ("heads", "tp"), ("kv_heads", "tp"), ("ffn", "tp"), ("experts", "ep")))
"""Megatron-LM's cuts (Shoeybi 2019), and GShard's of the experts (Lepikhin 2020)."""
