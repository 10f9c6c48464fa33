"""Buffers: elements and bytes of a rank's flat buffers of parameters, gradients and states, equal to those that
``engine.flat.buffers`` allocates.
"""

from __future__ import annotations

from collections.abc import Sequence

from superstep.cost.program.flops import UnitParameters
from superstep.plan.config import Dtype
from superstep.plan.mesh import FAMILIES, Family
from superstep.plan.narrow import BLOCK
from superstep.plan.optimizers import MOMENT_BYTES, MOMENTS
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.padding import ALIGN, pad
from superstep.plan.zero import Sharding

ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = ELEMENT_BYTES["fp32"]
EXACT = 8
"""Bytes of a gradient's element in exact mode."""
TOKEN = 8
"""Bytes of a token's number."""
INDEX = 8
"""Bytes of a row's or an expert's number."""


def family_numel(run: Resolved, unit: UnitParameters, family: Family) -> int:
    """Elements of a unit's whole flat buffer of one family on one rank; 0 without any."""
    mesh = run.plan.mesh
    numel = {
        "dense": unit.dense_on_rank(mesh.tp),
        "experts": unit.experts // mesh.ep,
        "adapters": unit.adapters_on_rank(mesh.tp),
        "statistics": unit.statistics,
        "sparse": unit.sparse,
        "frozen": unit.frozen_on_rank(mesh.tp),
        "packed": unit.count_packed_on_rank(mesh.tp),
    }[family]
    pieces = BLOCK // ALIGN if family in dict(unit.narrow) else unit.row_width if family == "sparse" else 1
    return pad(numel, mesh.shards(family) * pieces) if numel else 0


def count_fetched_bytes(run: Resolved, unit: UnitParameters) -> int:
    """Bytes of a unit that a rank has only while they are fetched: of the families that are sharded, and so not of
    experts that a single rank holds.
    """
    sharded = [family for family in run.plan.families if zero_stage(run, family).shards_parameters]
    return sum(element_bytes(run, family) * family_numel(run, unit, family) for family in sharded)


def element_bytes(run: Resolved, family: Family) -> int:
    """Bytes of an element of a family's parameters as modules read them."""
    return 1 if family == "packed" else ELEMENT_BYTES[run.config.numerics.compute]


def list_trained_families(run: Resolved) -> tuple[Family, ...]:
    return tuple(family for family in run.plan.families if run.plan.trains(family))


def gradient_numel(run: Resolved, unit: UnitParameters) -> int:
    """Elements of a unit's whole gradients on one rank."""
    return sum(family_numel(run, unit, family) for family in list_trained_families(run))


def count_settled_numel(run: Resolved, unit: UnitParameters) -> int:
    """Elements of a unit's gradient that a rank has only until they are settled into their shard."""
    sharded = [family for family in list_trained_families(run) if zero_stage(run, family).shards_gradients]
    return sum(family_numel(run, unit, family) for family in sharded)


def share_numel(run: Resolved, unit: UnitParameters, families: Sequence[Family] = FAMILIES) -> int:
    """Elements of a unit that one rank updates; only trained ones of ``families``."""
    trained = list_trained_families(run)
    return sum(count_held_numel(run, unit, family) for family in families if family in trained)


def count_held_numel(run: Resolved, unit: UnitParameters, family: Family) -> int:
    """Elements of a unit's buffer of one family that this rank holds."""
    shards = run.plan.mesh.shards(family) if zero_stage(run, family).shards_optimizer else 1
    return family_numel(run, unit, family) // shards


def moment_bytes(run: Resolved, unit: UnitParameters, family: Family) -> int:
    """Bytes of the moments of a unit's family on the rank that has most: the last one of its sharers, as those with
    fewer bits come first.
    """
    config, held = run.config.train, count_held_numel(run, unit, family)
    wide = min(held, family_numel(run, unit, family) - dict(unit.narrow).get(family, 0))
    of_one = FP32 * wide + round(MOMENT_BYTES[config.moments] * (held - wide))
    return len(MOMENTS[config.optimizer]) * of_one


def zero_stage(run: Resolved, family: Family | None = None) -> Sharding:
    """The ZeRO stage in effect, of gradients where no family is named: a single shard does not shard, and frozen
    parameters are only cut by stage 3.
    """
    family = family or list_trained_families(run)[0]
    zero = run.plan.zero if run.plan.mesh.shards(family) > 1 else 0
    return Sharding(zero if run.plan.trains(family) or run.plan.shards_parameters else 0)


def has_fused_loss(run: Resolved) -> bool:
    """Whether the head computes its loss and its gradient chunk by chunk, in its forward pass: not in exact mode."""
    return not is_exact(run)


def is_exact(run: Resolved) -> bool:
    return run.plan.grain is not None


def gradient_bytes(run: Resolved) -> int:
    """Bytes of an element where a gradient is summed."""
    return EXACT if is_exact(run) else FP32
