"""Stages of ZeRO: what is sharded over the ranks that share a unit's parameters (Rajbhandari 2020, section 5)."""

from __future__ import annotations

from dataclasses import dataclass


class ZeroStage:
    """Names for the number of a stage, for classes that have it. ``zero``: 0 shards nothing, 1 the optimizer's state, 2
    gradients too, 3 parameters too.
    """

    __slots__ = ()
    zero: int

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank updates only its shard: master weights and moments."""
        return self.zero >= 1

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank keeps only its shard of the gradients' sums."""
        return self.zero >= 2

    @property
    def shards_parameters(self) -> bool:
        """Whether a unit's parameters are fetched before use, and dropped after."""
        return self.zero >= 3


@dataclass(frozen=True, slots=True)
class Sharding(ZeroStage):
    """The stage in effect for some parameters."""

    zero: int
