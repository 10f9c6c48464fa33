"""Checks of ``superstep tune`` before torch is imported, as in ``cli.before_torch.refusals``."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.cli.arguments.tune import tune, tune_merge, tune_serve
from superstep.cli.launcher import launcher
from superstep.plan.model.multimodal.families import has_own_units
from superstep.plan.resolution.check_ranges import check_ranges
from superstep.plan.resolution.resolve import resolve
from superstep.run.hosts.hosts import Hosts
from superstep.run.launch_rules import check_launch
from superstep.run.serving.served_model import find_model
from superstep.train.run_folder import run_directory
from superstep.train.weights.weights_folder import weights_of
from superstep.tune.config import TuneConfig, check_recipe
from superstep.tune.initial_model import run_of
from superstep.tune.rl.config import RlRecipe
from superstep.tune.rl.initial_policy import check_run, check_same, with_start


def check_tune(kind: tune.Kind, config: TuneConfig) -> None:
    """Check a recipe of conversations or preferences; raises as ``refusals.check_train``."""
    check_recipe(kind, config)
    run = run_of(config)
    check_launch(run, 1, launcher())
    if has_own_units(run.model):
        check_ranges(run)
    else:
        run_directory.choose(resolve(run))


def check_rewards(recipe: RlRecipe, hosts: Hosts | None = None) -> None:
    """Check a recipe of rewards; raises as ``refusals.check_train``."""
    config, _ = with_start(recipe, recipe.rl, recipe.start)
    check_run(config, recipe.rl, recipe.rollout)
    check_launch(config, 1 if hosts is None else hosts.count, launcher())
    run = resolve(config)
    if hosts is None:
        _, folder, _ = run_directory.choose(run)
        check_same(recipe, folder)


def check_apart(word: str, argv: Sequence[str]) -> None:
    """Check the model of a merge, or of a server of adapters; raises as ``refusals.check_train``."""
    if word == tune.MERGE:
        weights_of(tune_merge.read(argv)[0])
    else:
        find_model(tune_serve.read(argv)[0])
