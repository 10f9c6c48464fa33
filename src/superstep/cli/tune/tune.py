"""superstep tune: post-training, one subcommand for each kind."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from superstep.cli.arguments.tune.tune import APART, REWARDS, read_kind, read_rewards
from superstep.cli.flags.options import asks_for_hosts
from superstep.cli.tune import rl, sft_dpo


def main(argv: Sequence[str]) -> int:
    """Run the subcommand."""
    if argv and argv[0] in APART:
        # Import the named subcommand only: serve has many dependencies that the others do not need.
        status: int = importlib.import_module(f"superstep.cli.tune.{argv[0]}").main(argv[1:])
        return status
    if argv[:1] == [REWARDS]:
        return rl.run(lambda: read_rewards(argv[1:]), has_hosts=asks_for_hosts(argv))
    return sft_dpo.run(lambda: read_kind(argv))
