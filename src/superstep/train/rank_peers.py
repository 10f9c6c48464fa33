"""The launched ranks as ``state`` wants them, and what all of them together hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from superstep.comm.objects import gather
from superstep.engine.engine import Engine
from superstep.model.unit import global_specs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankPeers:
    """The launched ranks, as ``state`` wants them."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        return gather(value)


def tensor_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The shape of every global tensor that is trained, in the order of the model. Every rank calls this together."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in gather({p.name: p.shape for p in engine.pieces(("weight",))}):
        shapes |= part
    return {name: shapes[name] for name in global_specs(engine.specs) if name in shapes}
