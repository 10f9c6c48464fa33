"""The job of superstep tune sft and dpo: its initial model and data; its loop is that of train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.job import TrainJob
from superstep.run.launch_rules import OWN, Launcher
from superstep.run.prepare_job import RunKind, prepare_job
from superstep.run.tokens import fill_folder
from superstep.train.run_folder.run_paths import RunFolder, tokens_folder
from superstep.train.weights.model import resolve_config, vocab_of
from superstep.tune.config import TuneConfig, check_recipe
from superstep.tune.dpo import make_dpo
from superstep.tune.epochs import length_of
from superstep.tune.initial_model import run_of
from superstep.tune.prepare_conversations import Conversations, Kind
from superstep.tune.recipe import RECIPE, write

Make = Callable[[Conversations, Path, RunFolder], object]
"""Makes the token files of conversations in a folder, for a run."""


def resolve_recipe(kind: Kind, config: TuneConfig, ranks: int | None = None) -> Resolved:
    """The run of a recipe.

    Args:
        kind: of tuning.
        config: the recipe.
        ranks: of another launcher; None under superstep's own.

    Raises:
        ConfigError: it is invalid.
    """
    check_recipe(kind, config)
    return resolve_config(run_of(config), ranks)


def prepare_tune_job(
    run: Resolved, kind: Kind, config: TuneConfig, make: Make, console: Console, *, launcher: Launcher = OWN
) -> AbstractContextManager[TrainJob | None]:
    """The job of a recipe's run; as ``prepare_job``.

    Args:
        run: of the recipe.
        kind: of tuning.
        config: the recipe.
        make: makes the token files.
        console: shows messages before the first step.
        launcher: of the ranks.
    """
    recipe = replace(config, **{name: getattr(run.config, name) for name in ("plan", "numerics")})

    def tokens(run: Resolved, folder: RunFolder, checkpoint: Path | None) -> Path:
        wanted = Conversations(run.config, config.sft, vocab_of(run), kind)
        kept = tokens_folder(run.config, folder.root)
        return fill_folder(kept, checkpoint, lambda kept: make(wanted, kept, folder))

    return prepare_job(
        run,
        tokens,
        console,
        launcher=launcher,
        kind=RunKind(
            verb=f"tune {kind}",
            files={RECIPE: write(recipe)},
            sequence_loss=make_dpo(config.dpo) if kind == "dpo" else None,
            length=length_of(config.sft.epochs),
        ),
    )
