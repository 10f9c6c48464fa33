"""From a recipe of reinforcement learning to a resolved run."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import ConfigError
from superstep.plan.resolution.resolve import Resolved
from superstep.run.hosts.hosts import share_out
from superstep.train.weights.model import resolve_config
from superstep.tune.rl.config import RlRecipe, RolloutConfig
from superstep.tune.rl.initial_policy import with_start
from superstep.tune.rl.job import own_ranks


def resolve_rl(recipe: RlRecipe, ranks: int | None = None, hosts: int = 1) -> tuple[Resolved, Path]:
    """The run of a recipe, and the folder of its initial model.

    Args:
        recipe: the recipe of the run.
        ranks: how many ranks another launcher has started; None if Superstep starts them.
        hosts: how many hosts share the ranks.

    Raises:
        ConfigError: the recipe cannot work.
        StateError: the model is missing or incomplete.
    """
    config, start = with_start(recipe, recipe.rl, recipe.start)
    samplers = own_ranks(recipe.rollout)
    if ranks is not None and ranks <= samplers:
        raise ConfigError(
            f"rollout.ranks = {samplers}: of the {ranks} ranks of torchrun none is left to train; start more ranks, or "
            "set fewer."
        )
    run = resolve_config(config, None if ranks is None else ranks - samplers)
    if hosts == 1:
        return run, start
    _require_equal_samplers(recipe.rollout, hosts)
    return share_out(run, hosts), start


def _require_equal_samplers(rollout: RolloutConfig, hosts: int) -> None:
    """Check that each host can have as many whole samplers.

    Raises:
        ConfigError: it cannot.
    """
    if own_ranks(rollout) % (hosts * rollout.tp):
        raise ConfigError(
            f"rollout.ranks = {own_ranks(rollout)}: --hosts = {hosts} share the samplers evenly, each with "
            f"rollout.tp = {rollout.tp} ranks; set a multiple of {hosts * rollout.tp}."
        )
