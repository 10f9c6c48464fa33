"""Arguments of superstep tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeVar

from superstep.cli.arguments.hosts import HostFlags, hosts_of
from superstep.cli.arguments.tune import tune_merge, tune_serve
from superstep.cli.flags.help import page
from superstep.cli.flags.options import COMMON, asks_for_help, read_flags
from superstep.errors import ConfigError, UserError, did_you_mean
from superstep.run.hosts.hosts import Hosts
from superstep.tune.config import TuneConfig, read_recipe
from superstep.tune.recipe import RECIPE
from superstep.tune.rl.config import RlRecipe, read_rl

Recipe = TypeVar("Recipe", TuneConfig, "RlOptions")

Kind = Literal["sft", "dpo"]
KINDS: Mapping[Kind, str] = {
    "sft": "learn the answers of conversations, or the completions of prompts",
    "dpo": "make preferred answers more likely than rejected ones, with the starting model as the reference",
}

REWARDS = "rl"
"""The kind with a recipe of its own type, ``RlRecipe``."""

MERGE, SERVE = "merge", "serve"
APART: Mapping[str, str] = {
    MERGE: "merge the adapter of a run into its base weights",
    SERVE: "serve Tinker's client, which trains adapters over HTTP",
}
"""Actions without a recipe, with other arguments (``arguments.tune_merge``, ``tune_serve``)."""

EVERY: Mapping[str, str] = dict(
    [
        *KINDS.items(),
        (REWARDS, "reinforcement learning: learn from rewards for the model's own answers"),
        *APART.items(),
    ]
)

FIRST = ("start", "data.corpus", "data.sequence_tokens", "sft.too_long", *COMMON[2:])
FIRST_OF_REWARDS = (
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
"""The fields that the help lists first."""


@dataclass(frozen=True, kw_only=True)
class RlOptions(HostFlags, RlRecipe):
    """A recipe of reinforcement learning, with the flags of its hosts."""


@dataclass(frozen=True, slots=True)
class RlArgs:
    """The recipe of a command line; ``hosts`` is None for one host."""

    recipe: RlRecipe
    hosts: Hosts | None = None


def _usage() -> str:
    usage = "usage: superstep tune sft|dpo|rl [recipe.toml] [--FLAG VALUE ...]"
    return page(usage, EVERY.items(), "superstep tune sft|dpo|rl|merge|serve --help lists the flags.")


def read(argv: Sequence[str]) -> tuple[Kind, TuneConfig] | RlRecipe:
    """The recipe of a command line; raises as ``read_kind`` does."""
    return read_rewards(argv[1:]).recipe if argv[:1] == [REWARDS] else read_kind(argv)


def read_rewards(argv: Sequence[str]) -> RlArgs:
    """The recipe of reinforcement learning, and its hosts; raises as ``read_kind`` does."""
    records = "the tasks with --rl.environment"
    options = _recipe(REWARDS, RlOptions(), _read_rl, argv, records=records, common=FIRST_OF_REWARDS)
    recipe = RlRecipe(**{each.name: getattr(options, each.name) for each in fields(RlRecipe)})
    return RlArgs(recipe, hosts_of(options))


def _read_rl(path: Path) -> RlOptions:
    recipe = read_rl(path)
    return RlOptions(**{each.name: getattr(recipe, each.name) for each in fields(recipe)})


def read_kind(argv: Sequence[str]) -> tuple[Kind, TuneConfig]:
    """The kind of tuning, and its recipe.

    Raises:
        UserError: no kind, or an unknown one, is named.
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: after printing help.
    """
    if not argv or argv[0].startswith("-"):
        if asks_for_help(argv):
            print(_usage())
            raise SystemExit(0)
        raise UserError(f"superstep tune needs an action; name one of {', '.join(EVERY)}.")
    kind, *rest = argv
    if kind in APART and asks_for_help(rest):
        {MERGE: tune_merge.read, SERVE: tune_serve.read}[kind](rest)
    for known in KINDS:
        if kind == known:
            records = "the records with --data.corpus"
            return known, _recipe(kind, TuneConfig(), read_recipe, rest, records=records, common=FIRST)
    raise UserError(f"superstep tune has no action '{kind}'{did_you_mean(kind, EVERY)}")


def _recipe(
    kind: str, base: Recipe, load: Callable[[Path], Recipe], argv: Sequence[str], *, records: str, common: Sequence[str]
) -> Recipe:
    def flags(base: Recipe, argv: Sequence[str]) -> Recipe:
        description = f"Post-train a model: {EVERY[kind]}."
        return read_flags(
            base, argv, prog=f"superstep tune {kind} [recipe.toml]", description=description, common=common
        )

    if argv and not argv[0].startswith("-"):
        path = Path(argv[0])
        if path.is_file() and path.suffix != ".toml":
            raise ConfigError(f"'{path}' is not a .toml file; name a recipe, or {records} {path}.")
        return flags(load(path), argv[1:])
    recipe = flags(base, argv)
    saved = Path(recipe.state.dir) / RECIPE
    if recipe.state.existing == "resume" and saved.is_file():
        # A resumed run keeps its own settings; flags still change them.
        recipe = flags(load(saved), argv)
    return recipe
