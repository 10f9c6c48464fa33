"""MeshShape: how ranks are numbered, and which of them hold the same parameters.

Axes from slowest to fastest are pp, dp, cp, tp. Two degrees cross them and add no ranks: ``ep`` folds over dp·cp·tp,
and ``replicas`` divides the ranks with the same parameters into groups that each shard them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")

Family = Literal["dense", "experts", "adapters", "statistics", "sparse", "frozen", "packed"]
"""Parameters that are stored alike: experts' are cut over ep, all others over tp. Adapters, running statistics, tables
with sparse gradients, frozen parameters and frozen matrices in blocks of few bits, which count bytes, are on the same
ranks as the dense ones, in buffers of their own.
"""
FAMILIES: tuple[Family, ...] = ("dense", "experts", "adapters", "statistics", "sparse", "frozen", "packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """A rank's place on each axis."""

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

    The ranks with the same dense parameters are the dp·cp *sharers* of one tp place; with ``ep`` = 2, every second rank
    of a stage holds the same experts. With ``replicas`` = 2 each half of the sharers shards the parameters:

        dp=4 replicas=2     rank    0 1 2 3
                            shard   0 1 0 1
                            replica 0 0 1 1
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    replicas: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data(self) -> int:
        """Ranks with the same dense parameters and different tokens: dp·cp."""
        return self.dp * self.cp

    def degree(self, axis: Axis) -> int:
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}[axis]

    def at(self, rank: int) -> Coordinate:
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return Coordinate(**place)

    def rank(self, at: Coordinate) -> int:
        number = 0
        for axis in AXES:
            number = number * self.degree(axis) + getattr(at, axis)
        return number

    def expert_place(self, at: Coordinate) -> int:
        """Which share of the experts a rank holds: 0 to ep - 1."""
        return self._within_stage(at) % self.ep

    def sharers(self, family: Family) -> int:
        """The number of ranks with the same parameters of a family."""
        return self.data * self.tp // self.ep if family == "experts" else self.data

    def sharer(self, family: Family, at: Coordinate) -> int:
        """A rank's number among its sharers."""
        return self._within_stage(at) // self.ep if family == "experts" else at.dp * self.cp + at.cp

    def shards(self, family: Family) -> int:
        """The number of ranks that shard one copy of a family's parameters."""
        return self.sharers(family) // self.replicas

    def groups(self, axis: Axis) -> list[list[int]]:
        """Every group of ranks that differ only along one axis, in the order of that axis."""
        return self._group(lambda at: tuple(getattr(at, other) for other in AXES if other != axis))

    def expert_groups(self) -> list[list[int]]:
        """Every group of ranks that hold all experts together, in the order of the experts."""
        return self._group(lambda at: (at.pp, self.sharer("experts", at)))

    def sequence_groups(self) -> list[list[int]]:
        """Every group of ranks that hold parts of the same sequences, cp slower than tp."""
        return self._group(lambda at: (at.pp, at.dp))

    def shard_groups(self, family: Family) -> list[list[int]]:
        """Every group of ranks that shard one copy of the same parameters, in the order of the shards."""
        shards = self.shards(family)
        return self._group(lambda at: (*self._parameters(family, at), self.sharer(family, at) // shards))

    def replica_groups(self, family: Family) -> list[list[int]]:
        """Every group of ranks with the same shard."""
        shards = self.shards(family)
        return self._group(lambda at: (*self._parameters(family, at), self.sharer(family, at) % shards))

    def _parameters(self, family: Family, at: Coordinate) -> tuple[int, int]:
        return at.pp, self.expert_place(at) if family == "experts" else at.tp

    def _within_stage(self, at: Coordinate) -> int:
        return (at.dp * self.cp + at.cp) * self.tp + at.tp

    def _group(self, key: Callable[[Coordinate], Hashable]) -> list[list[int]]:
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.world):
            groups.setdefault(key(self.at(rank)), []).append(rank)
        return list(groups.values())
