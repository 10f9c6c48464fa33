"""The optimum of the choices of what a rank keeps: a mixed-integer program for HiGHS (after Checkmate, Jain 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from superstep.cost.program.budget.evict import KeptUnit
from superstep.hardware.units import Array

MOST_S = 60.0


def find_optimum(levels: Array, kept: Sequence[KeptUnit], limit_bytes: float) -> float | None:
    """The least seconds of evictions with which a rank stays within a limit; None where none are enough.

    A variable for each eviction says whether it is chosen, of one unit and microbatch one at most. At each instruction
    the level without what is evicted then, and with what it adds, is within the limit.

    Raises:
        TimeoutError: HiGHS did not end within ``MOST_S``.
    """
    evictions = [(number, eviction) for number, unit in enumerate(kept) for eviction in unit.evictions]
    if not evictions:
        return 0.0 if levels.max(initial=0.0) <= limit_bytes else None
    unit_bytes = max(float(levels.max()), 1.0)  # HiGHS counts in shares of the highest level
    change = lil_array((len(levels), len(evictions)))
    once = lil_array((len(kept), len(evictions)))
    for column, (number, eviction) in enumerate(evictions):
        change[eviction.begin : eviction.end, column] = -eviction.bytes / unit_bytes
        change[eviction.end, column] = eviction.extra_bytes / unit_bytes
        once[number, column] = 1
    rows = [
        LinearConstraint(change.tocsr(), ub=(limit_bytes - levels) / unit_bytes),
        LinearConstraint(once.tocsr(), ub=np.ones(len(kept))),
    ]
    seconds = np.array([eviction.seconds for _, eviction in evictions])
    answer = milp(
        seconds,
        constraints=rows,
        integrality=np.ones(len(evictions)),
        bounds=Bounds(0, 1),
        options={"time_limit": MOST_S, "mip_rel_gap": 1e-6},
    )
    if answer.status == 1:
        raise TimeoutError(f"HiGHS took more than {MOST_S:g} s")
    return None if answer.x is None else float(seconds @ np.round(answer.x))
