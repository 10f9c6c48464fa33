"""superstep tune: post-training, one word for each kind of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from superstep.cli.arguments import reinforce as rewards
from superstep.cli.arguments.tune import APART, REWARDS, read
from superstep.cli.tune import learn, reinforce


def main(argv: Sequence[str]) -> int:
    """Do what the first word says."""
    if argv and argv[0] in APART:
        # The one that is asked for: a server brings much that the others have no use for.
        status: int = importlib.import_module(f"superstep.cli.tune.{argv[0]}").main(argv[1:])
        return status
    if argv[:1] == [REWARDS]:
        return reinforce.run(rewards.read(argv[1:]))
    return learn.run(lambda: read(argv))
