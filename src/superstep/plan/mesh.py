"""The mesh: how ranks are numbered.

Axes from slowest to fastest are pp, dp, cp, tp; ep folds over dp·cp·tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """One rank's place on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The degree of each axis.

    Ranks count tp fastest, so that tensor-parallel ranks are neighbours:

        pp=2 dp=1 tp=2      rank 0 1 | 2 3
                            tp   0 1 | 0 1
                            pp   0 0 | 1 1
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.cp * self.tp

    def degree(self, axis: Axis) -> int:
        """Ranks along one axis."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}[axis]

    def at(self, rank: int) -> Coordinate:
        """The place of a rank."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return Coordinate(**place)

    def rank(self, at: Coordinate) -> int:
        """The rank at a place."""
        number = 0
        for axis in AXES:
            number = number * self.degree(axis) + getattr(at, axis)
        return number

    def groups(self, axis: Axis) -> list[list[int]]:
        """Every group of ranks that differ along one axis only, each in the order of that axis."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.at(rank)
            key = tuple(getattr(at, other) for other in AXES if other != axis)
            found.setdefault(key, []).append(rank)
        return list(found.values())
