"""Which attention a rank runs, and which positions of the sequence it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.model.decoder import Attend, attention_of, flash
from superstep.numerics.fixed_point import ACTIVATION, Excess
from superstep.plan.resolve import Resolved
from superstep.plan.split.sequence import positions
from superstep.runtime.exact.attention import Alone, ExactAttend
from superstep.runtime.mesh import Group, Mesh
from superstep.runtime.parallel.context import gather_kv, scatter_sum
from superstep.runtime.parallel.ring import RingAttend
from superstep.runtime.parallel.ulysses import UlyssesAttend


@dataclass(frozen=True, slots=True)
class Gathered:
    """Keys and values of all context-parallel ranks, for exact mode: every rank sees them whole."""

    group: Group

    def gather(self, x_BsKH: Tensor) -> Tensor:
        """Those of the whole sequence, in its order."""
        return gather_kv(x_BsKH, self.group)

    def scatter_sum(self, x_BSKH: Tensor) -> Tensor:
        """The sum over ranks, of this rank's own."""
        return scatter_sum(x_BSKH, self.group)


def build_attend(run: Resolved, mesh: Mesh, excess: Excess) -> tuple[Attend, Tensor | None]:
    """The attention of the plan, and the positions of this rank's tokens where they are not 0, 1, 2, ...

    What exact sums have no room for is noted in ``excess``.
    """
    grain, group = run.plan.grain, mesh.cp
    grid = ACTIVATION.of(grain.chunks if grain else 2, "the gradient of a key or a value", excess)
    alone = flash if run.decoder is None else attention_of(run.decoder)
    whole: Attend = alone if grain is None else ExactAttend(range(grain.chunks), Alone(), grid)
    if group is None:
        return whole, None
    cp, tokens = mesh.shape.cp, run.config.data.sequence_tokens
    held = torch.tensor(positions(tokens, cp=cp, rank=mesh.at.cp), device=mesh.device.torch)
    if run.plan.context == "ulysses":
        return UlyssesAttend(group, whole), held
    if grain is None:
        return RingAttend(group), held
    return ExactAttend(positions(grain.chunks, cp=cp, rank=mesh.at.cp), Gathered(group), grid), held
