"""fit: whether a plan's fullest rank fits the memory, what overflows, and which changes would fit.

A mend is tried, not guessed: the run with one field changed is resolved again and its memory computed by the same
formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from superstep.cost.program.memory.communicators import communicator_bytes
from superstep.cost.program.memory.memory import RankBytes, rank_bytes
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.resolution.resolve import Plan, Resolved
from superstep.program.compile import compile_step

Category: TypeAlias = Literal[
    "communicators", "parameters", "gradients", "optimizer", "activations", "buffers", "workspace"
]

MemoryOf: TypeAlias = Callable[[RunConfig], tuple[RankBytes, ...]]
"""The memory of each pipeline rank of a configuration; raises ConfigError for an invalid one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitChange:
    """A change that fits: a field of the run, its value, and the fullest rank's bytes."""

    field: str
    value: int | str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverflow:
    """A plan that does not fit.

    Attributes:
        rank: the fullest pipeline rank.
        parts: its bytes by category.
        category: the first without room, in the order in which memory is taken.
        needed_bytes: of the rank in all.
        limit_bytes: available.
        mends: changes of one field that fit, the cheapest in time first.
    """

    rank: int
    parts: dict[Category, int]
    category: Category
    needed_bytes: int
    limit_bytes: int
    mends: tuple[FitChange, ...]


def by_category(rank: RankBytes) -> dict[Category, int]:
    """A rank's bytes at its peak by category, persistent and transient."""
    peak = rank.peak
    communicators: dict[Category, int] = {"communicators": rank.communicators} if rank.communicators else {}
    parts: dict[Category, int] = {
        "parameters": rank.params + peak.params_bytes,
        "gradients": rank.gradients + peak.gradient_bytes,
        "optimizer": rank.optimizer,
        "activations": peak.kept_bytes,
        "buffers": rank.batch + peak.boundary_bytes,
        "workspace": peak.workspace_bytes,
    }
    return communicators | parts


def with_communicators(ranks: Sequence[RankBytes], plan: Plan) -> tuple[RankBytes, ...]:
    """The same on GPUs."""
    sizes = communicator_bytes(plan)
    return tuple(replace(rank, communicators=size) for rank, size in zip(ranks, sizes, strict=True))


def memory_of(run: Resolved) -> tuple[RankBytes, ...]:
    """Each pipeline rank's memory by the formulas of our own decoder."""
    return rank_bytes(run, compile_step(run.plan))


def overflow(config: RunConfig, memory: MemoryOf, limit_bytes: int) -> MemoryOverflow | None:
    """Why a run does not fit ``limit_bytes`` on each rank; None where it does.

    Args:
        config: resolved, with nothing automatic left.
        memory: called for it, and for it with another plan.
    """
    ranks = memory(config)
    number = max(range(len(ranks)), key=lambda r: ranks[r].bytes)
    if ranks[number].bytes <= limit_bytes:
        return None
    parts = by_category(ranks[number])
    sums = accumulate(parts.values())
    category = next(name for name, taken in zip(parts, sums, strict=True) if taken > limit_bytes)
    return MemoryOverflow(
        rank=number,
        parts=parts,
        category=category,
        needed_bytes=ranks[number].bytes,
        limit_bytes=limit_bytes,
        mends=tuple(_mends(config, memory, limit_bytes)),
    )


def _mends(config: RunConfig, memory: MemoryOf, limit_bytes: int) -> Iterator[FitChange]:
    """The first value of each field that fits."""
    for field, values in _choices(config):
        for value in values:
            fields: dict[str, Any] = {field: value}
            changed = replace(config, plan=replace(config.plan, **fields, kept=None))
            try:
                size = max(rank.bytes for rank in memory(changed))
            except ConfigError:
                continue
            if size <= limit_bytes:
                yield FitChange(field=f"plan.{field}", value=value, bytes=size)
                break


def _choices(config: RunConfig) -> Iterator[tuple[str, list[int | str]]]:
    """Fields that trade time for memory, each with the values beyond its own, cheapest first."""
    plan = config.plan
    policies: list[int | str] = ["none", "selective", "full"]
    yield "zero", list(range(plan.zero + 1, 4))
    yield "recompute", policies[policies.index(plan.recompute) + 1 :] if plan.recompute in policies else []
    assert plan.microbatch is not None, "the configuration is resolved"
    yield "microbatch", [size for size in range(plan.microbatch - 1, 0, -1) if plan.microbatch % size == 0]
    yield "tp", [plan.tp * ways for ways in (2, 4, 8)]
    yield "pp", [plan.pp * ways for ways in (2, 4, 8)]
