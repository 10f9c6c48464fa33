"""From a global batch to a rank's microbatches."""

from __future__ import annotations

from torch import Tensor

from superstep.plan.resolve import Plan
from superstep.plan.split.sequence import positions
from superstep.runtime.executor import Microbatch
from superstep.runtime.mesh import Mesh


def rows(plan: Plan, mesh: Mesh) -> slice:
    """The rows of the global batch that this rank's data-parallel place trains on."""
    count = plan.microbatches * plan.microbatch
    return slice(mesh.at.dp * count, (mesh.at.dp + 1) * count)


def microbatches(tokens_BS: Tensor, targets_BS: Tensor, plan: Plan, mesh: Mesh) -> list[Microbatch]:
    """This rank's tokens of its rows, cut into microbatches on its device."""
    device = mesh.device.torch
    if mesh.shape.cp > 1:
        held = list(positions(tokens_BS.shape[1], cp=mesh.shape.cp, rank=mesh.at.cp))
        tokens_BS, targets_BS = tokens_BS[:, held], targets_BS[:, held]
    pairs = zip(tokens_BS.split(plan.microbatch), targets_BS.split(plan.microbatch), strict=True)
    return [Microbatch(tokens=tokens.to(device), targets=targets.to(device)) for tokens, targets in pairs]
