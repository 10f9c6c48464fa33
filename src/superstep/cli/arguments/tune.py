"""What superstep tune is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from superstep.cli.arguments import tune_merge, tune_serve
from superstep.cli.help import page
from superstep.cli.options import COMMON, asks_for_help, read_flags
from superstep.errors import ConfigError, UserError, did_you_mean
from superstep.tune.config import TuneConfig, read_recipe
from superstep.tune.recipe import RECIPE

Kind = Literal["sft", "dpo"]
KINDS: Mapping[Kind, str] = {
    "sft": "learn the answers of conversations, or how prompts go on",
    "dpo": "make preferred answers likelier than others, next to the model that it begins with",
}

REWARDS = "rl"
"""The kind whose recipes are others: ``cli.arguments.reinforce`` reads them."""

MERGE, SERVE = "merge", "serve"
APART: Mapping[str, str] = {
    MERGE: "put the adapter of a run into the weights that it adds to",
    SERVE: "let others train adapters over HTTP, by Tinker's client",
}
"""Words that have no recipe, and ask for other things (``arguments.tune_merge``, ``tune_serve``)."""

EVERY: Mapping[str, str] = dict(
    [*KINDS.items(), (REWARDS, "learn from the rewards of its own answers"), *APART.items()]
)

FIRST = ("start", "data.corpus", "data.sequence_tokens", "sft.too_long", *COMMON[2:])
"""Fields of a recipe that its help begins with."""


def _usage() -> str:
    usage = "usage: superstep tune sft|dpo|rl [recipe.toml] [--FLAG VALUE ...]"
    return page(usage, EVERY.items(), "superstep tune sft --help says more.")


def read(argv: Sequence[str]) -> tuple[Kind, TuneConfig]:
    """What is to be done, and the recipe that a command line asks for.

    Raises:
        UserError: nothing, or nothing known, is to be done.
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: help was asked for, and has been given.
    """
    if not argv or argv[0].startswith("-"):
        if asks_for_help(argv):
            print(_usage())
            raise SystemExit(0)
        raise UserError(f"superstep tune needs to be told what to do; name one of {', '.join(EVERY)}.")
    kind, *rest = argv
    if kind in APART and asks_for_help(rest):
        {MERGE: tune_merge.read, SERVE: tune_serve.read}[kind](rest)
    for known in KINDS:
        if kind == known:
            return known, _recipe(known, rest)
    raise UserError(f"superstep tune knows no '{kind}'{did_you_mean(kind, EVERY)}")


def _recipe(kind: Kind, argv: Sequence[str]) -> TuneConfig:
    if argv and not argv[0].startswith("-"):
        path = Path(argv[0])
        if path.is_file() and path.suffix != ".toml":
            raise ConfigError(f"'{path}' is no .toml file; name a recipe, or the records with --data.corpus {path}.")
        return _flags(kind, read_recipe(path), argv[1:])
    config = _flags(kind, TuneConfig(), argv)
    saved = Path(config.state.dir) / RECIPE
    if config.state.existing == "resume" and saved.is_file():
        # A run that goes on keeps its own settings; flags still change them.
        config = _flags(kind, read_recipe(saved), argv)
    return config


def _flags(kind: Kind, base: TuneConfig, argv: Sequence[str]) -> TuneConfig:
    description = f"Post-train a model: {KINDS[kind]}."
    return read_flags(base, argv, prog=f"superstep tune {kind} [recipe.toml]", description=description, common=FIRST)
