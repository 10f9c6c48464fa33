"""From a global batch to a rank's microbatches."""

from __future__ import annotations

from torch import Tensor

from superstep.plan.resolve import Plan, Resolved
from superstep.runtime.executor import Microbatch
from superstep.runtime.mesh import Mesh


def rows(plan: Plan, mesh: Mesh) -> slice:
    """The rows of the global batch that this rank's data-parallel place trains on."""
    count = plan.microbatches * plan.microbatch
    return slice(mesh.at.dp * count, (mesh.at.dp + 1) * count)


def microbatches(tokens_BS: Tensor, targets_BS: Tensor, plan: Plan, mesh: Mesh) -> list[Microbatch]:
    """This rank's rows, cut into microbatches on its device."""
    device = mesh.device.torch
    pairs = zip(tokens_BS.split(plan.microbatch), targets_BS.split(plan.microbatch), strict=True)
    return [Microbatch(tokens=tokens.to(device), targets=targets.to(device)) for tokens, targets in pairs]


def ties(run: Resolved) -> tuple[tuple[int, ...], ...]:
    """The sets of pipeline ranks that share parameters: first and last, for a tied head."""
    plan = run.plan
    rank_of = {unit: stage % plan.mesh.pp for stage, units in enumerate(plan.stages) for unit in units}
    readers: dict[int, set[int]] = {}
    for unit, reads in enumerate(plan.params):
        for owner in reads:
            readers.setdefault(owner, set()).add(rank_of[unit])
    return tuple(sorted({tuple(sorted(ranks)) for ranks in readers.values() if len(ranks) > 1}))
