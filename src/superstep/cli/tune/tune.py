"""superstep tune: post-training, one word for each kind of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from superstep.cli.arguments.tune.tune import APART, REWARDS, read_kind, read_rewards
from superstep.cli.tune import rl, sft_dpo


def main(argv: Sequence[str]) -> int:
    """Do what the first word says."""
    if argv and argv[0] in APART:
        # The one that is asked for: a server brings much that the others have no use for.
        status: int = importlib.import_module(f"superstep.cli.tune.{argv[0]}").main(argv[1:])
        return status
    if argv[:1] == [REWARDS]:
        return rl.run(lambda: read_rewards(argv[1:]))
    return sft_dpo.run(lambda: read_kind(argv))
