"""superstep tune: post-training, one word for each kind of it."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.cli.arguments import reinforce as rewards
from superstep.cli.arguments.tune import REWARDS, read
from superstep.cli.tune import learn, reinforce


def main(argv: Sequence[str]) -> int:
    """Do what the first word says."""
    if argv[:1] == [REWARDS]:
        return reinforce.run(rewards.read(argv[1:]))
    return learn.run(lambda: read(argv))
