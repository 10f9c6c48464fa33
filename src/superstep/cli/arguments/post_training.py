"""What superstep tune is asked for, whatever its kind."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.cli.arguments import reinforce, tune
from superstep.tune.config import TuneConfig
from superstep.tune.rl.config import RlRecipe


def read(argv: Sequence[str]) -> tuple[tune.Kind, TuneConfig] | RlRecipe:
    """The recipe that a command line asks for; raises as the readers of the kinds do."""
    return reinforce.read(argv[1:]) if argv[:1] == [tune.REWARDS] else tune.read(argv)
