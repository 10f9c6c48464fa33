"""Before a verb imports torch: it does so for the process, too, that its ranks are forked from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from superstep.cli.arguments import post_training, prove, serve, train, tune
from superstep.cli.options import asks_for_hosts
from superstep.plan.config import PlanConfig
from superstep.plan.mesh import AXES
from superstep.runtime import seed


def begin(verb: str, argv: Sequence[str]) -> None:
    """Begin it where the verb will launch ranks; what is wrong with its arguments is told here or later.

    Raises:
        ConfigError: a file cannot be used, or a flag is wrong.
    """
    if verb == "train" and ("RANK" not in os.environ or asks_for_hosts(argv)):
        asked = train.read(argv)
        if asked.hosts is not None or _ranks(asked.config.plan) > 1:
            seed.begin("superstep.cli.train.verb")
    elif verb == "tune" and not (argv and argv[0] in tune.APART) and "RANK" not in os.environ:
        if _ranks(post_training.read(argv).plan) > 1:
            seed.begin("superstep.cli.tune.verb")
    elif verb == "prove":
        options, _ = prove.read(argv)
        if (options.world or _ranks(options.plan)) > 1:
            seed.begin("superstep.cli.prove.verb")
    elif verb == "serve" and serve.read(argv)[0].exists():
        seed.begin("superstep.serve.rank")


def _ranks(plan: PlanConfig) -> int:
    """How many a plan says that there are; what it leaves open is not counted."""
    return math.prod(getattr(plan, axis) or 1 for axis in AXES)
