"""Before a verb imports torch: the process that its ranks are forked from begins to do so beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from superstep.cli.arguments import serve, train
from superstep.plan.mesh import AXES
from superstep.runtime import seed


def begin(verb: str, argv: Sequence[str]) -> None:
    """Begin it where the verb will launch ranks; what is wrong with its arguments is told here or later.

    Raises:
        ConfigError: a file cannot be used, or a flag is wrong.
    """
    if verb == "train" and "RANK" not in os.environ:
        plan = train.read(argv).config.plan
        if math.prod(getattr(plan, axis) or 1 for axis in AXES) > 1:
            seed.begin("superstep.cli.train.verb")
    elif verb == "serve" and serve.read(argv)[0].exists():
        seed.begin("superstep.serve.rank")
