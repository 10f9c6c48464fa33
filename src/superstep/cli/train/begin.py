"""Before superstep train imports torch: the process that its ranks are forked from begins to do so beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from superstep.cli.arguments.train import read
from superstep.plan.mesh import AXES
from superstep.runtime import seed


def begin(argv: Sequence[str]) -> None:
    """Begin it where there will be ranks of this process; what is wrong with the arguments is told here or later."""
    plan = read(argv).config.plan
    is_alone = math.prod(getattr(plan, axis) or 1 for axis in AXES) == 1
    if not is_alone and "RANK" not in os.environ:
        seed.begin("superstep.cli.train.verb")
