"""What superstep tune rl is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.tune import EVERY, REWARDS
from superstep.cli.options import read_flags
from superstep.errors import ConfigError
from superstep.tune.recipe import RECIPE
from superstep.tune.rl.config import RlRecipe, read_rl

FIRST = (
    "start",
    "rl.environment",
    "rl.group",
    "rl.groups",
    "rl.lag",
    "rollout.max_tokens",
    "data.sequence_tokens",
    "train.steps",
    "train.lr",
    "plan.dp",
    "plan.tp",
    "numerics.exact",
    "state.dir",
    "state.existing",
)
"""Fields of a recipe that its help begins with."""


def read(argv: Sequence[str]) -> RlRecipe:
    """The recipe that a command line asks for, behind the word for the kind.

    Raises:
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: help was asked for, and has been given.
    """
    if argv and not argv[0].startswith("-"):
        path = Path(argv[0])
        if path.is_file() and path.suffix != ".toml":
            raise ConfigError(f"'{path}' is no .toml file; name a recipe, or the tasks with --rl.environment {path}.")
        return _flags(read_rl(path), argv[1:])
    recipe = _flags(RlRecipe(), argv)
    saved = Path(recipe.state.dir) / RECIPE
    if recipe.state.existing == "resume" and saved.is_file():
        # A run that goes on keeps its own settings; flags still change them.
        recipe = _flags(read_rl(saved), argv)
    return recipe


def _flags(base: RlRecipe, argv: Sequence[str]) -> RlRecipe:
    return read_flags(
        base,
        argv,
        prog="superstep tune rl [recipe.toml]",
        description=f"Post-train a model: {EVERY[REWARDS]}.",
        common=FIRST,
    )
