"""Which attention a rank runs, and which positions of the sequence it holds."""

from __future__ import annotations

from torch import Tensor

from superstep.model.decoder import Attend, flash
from superstep.plan.resolve import Resolved
from superstep.runtime.exact_attention import Alone, ExactAttend
from superstep.runtime.mesh import Mesh


def build_attend(run: Resolved, mesh: Mesh) -> tuple[Attend, Tensor | None]:
    """The attention of the plan, and the positions of this rank's tokens where they are not 0, 1, 2, ..."""
    grain = run.plan.grain
    if grain is None:
        return flash, None
    return ExactAttend(range(grain.chunks), Alone()), None
