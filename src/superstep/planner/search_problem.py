"""SearchProblem: the run and the chips that a plan is searched for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from superstep.cost.closed.efficiency import FITTED, Efficiency
from superstep.hardware.cluster import Cluster
from superstep.plan.config import Dtype, RunConfig
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.sizes.lookup import shape_of

FIELDS = (
    "dp",
    "replicas",
    "zero",
    "tp",
    "sequence_parallel",
    "pp",
    "chunks",
    "schedule",
    "cp",
    "context",
    "ep",
    "microbatch",
    "microbatch_group",
    "recompute",
)
"""The fields of ``[plan]`` that a search chooses."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A field of ``[plan]`` that must have a value, or must not. ``value``: as in ``[plan]``; None stands for no group
    of microbatches.
    """

    field: str
    value: object
    is_wanted: bool = True

    def admits(self, field: str, value: object) -> bool:
        """Whether a plan may have this value in this field."""
        return field != self.field or (value == self.value) == self.is_wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """A run with an open layout, and its chips.

    Attributes:
        base: the run; of its ``plan`` only ``prefetch`` is used.
        compute: the format of its products, instead of the base's.
        memory_bytes: of one chip, as far as a plan may fill it.
        is_host: its ranks are processes of hosts, without communicators.
        rules: fields that are fixed in advance.
        efficiency: the shares of published rates that a step reaches.
    """

    base: RunConfig
    cluster: Cluster
    compute: Dtype
    memory_bytes: float
    is_host: bool = False
    rules: tuple[Rule, ...] = ()
    efficiency: Efficiency = FITTED

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.base.model, is_priced=True)

    @property
    def sequence_tokens(self) -> int:
        return self.base.data.sequence_tokens

    @property
    def batch_sequences(self) -> int:
        return self.base.train.batch_sequences

    @property
    def batch_tokens(self) -> int:
        return self.batch_sequences * self.sequence_tokens

    def admits(self, field: str, value: object) -> bool:
        """Whether the rules allow a value."""
        return all(rule.admits(field, value) for rule in self.rules)

    def on(self, chips: int) -> SearchProblem:
        """The same on ``chips`` chips of the same kind."""
        return replace(self, cluster=replace(self.cluster, chips=chips))
