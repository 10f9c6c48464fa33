"""RlRecipe: a run and the settings of reinforcement learning, in one recipe.toml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from superstep.errors import ConfigError
from superstep.grade.config import GradeConfig
from superstep.plan.config import ProposedData, StateConfig, TrainConfig
from superstep.tune.advantage import Estimator
from superstep.tune.program.instructions import Placement
from superstep.tune.recipe import Recipe, Usual, read

Surrogate = Literal["score", "ratio", "clip"]
Correction = Literal["none", "tis", "mis"]
Ratio = Literal["token", "sequence"]
CutOff = Literal["none", "mask", "penalty"]

USUAL: Usual = {
    "data": {"document_mask": True},
    "train": {"lr": 1e-5, "weight_decay": 0.0, "warmup_steps": 0, "min_lr_ratio": 1.0},
    "state": {"dir": "runs/rl", "save_every": 10},
}
"""Defaults of a recipe's run that differ from those of a run with random weights."""

USUAL_TOKENS = 512
"""Default sequence length, if the model supports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlConfig:
    """The loss, and the limits of a step."""

    environment: str = ""
    """A Python file with `task(index, seed)`, `grade(task, rollout)` and, for several turns, `reply(task, turns)`."""
    group: int = 8
    """Answers to each task, which are compared with each other."""
    groups: int = 8
    """Tasks of a step."""
    rows: int | None = None
    """Rows of a step's batch that its plan assumes; none uses one for each answer. Several answers share a row, and a
    step has as many microbatches as they fill.
    """
    lag: int = 0
    """The most steps that the weights of an answer may be older than the trained ones; 0 is on policy."""
    window: int = 0
    """From how many later steps a step may take graded groups in place of its own missing ones, at most `lag`: for
    ranks apart in fast mode. Answers may then be that many steps older than `lag` says.
    """
    estimator: Estimator = "grpo"
    """How rewards of a group become advantages: grpo (Shao 2024), rloo (Ahmadian 2024) or dr-grpo (Liu 2025)."""
    ratio: Ratio = "token"
    """The unit of the probability ratio to the sampler: a token, or a whole answer (GSPO, Zheng 2025)."""
    surrogate: Surrogate = "clip"
    """The loss of an advantage: score (Williams 1992), ratio (importance sampling) or clip (PPO, Schulman 2017)."""
    clip_low: float = 0.2
    """How far below 1 a ratio still counts."""
    clip_high: float = 0.2
    """How far above 1 it does; more than `clip_low` keeps unlikely tokens alive (DAPO, Yu 2025)."""
    kl_coef: float = 0.0
    """Weight of the distance from the run's initial weights, which then also stay on the ranks (k3, Schulman 2020)."""
    correction: Correction = "none"
    """For a sampler with other log-probabilities than the trainer's: weigh a token by their ratio up to a bound (tis),
    or leave it out beyond that (mis).
    """
    overlong: CutOff = "mask"
    """Treatment of long answers: mask leaves out those that were cut, penalty reduces the reward of all near the token
    limit (DAPO), none does nothing.
    """
    drop_uniform: bool = False
    """Leave out groups with equal rewards (DAPO); they teach nothing, but count in the divisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How answers are sampled."""

    max_tokens: int = 64
    """The most tokens of a turn."""
    turns: int = 1
    """The most turns of an answer."""
    temperature: float = 1.0
    """Divides the logits in sampling, and in training too: the trained policy is the sampled one."""
    placement: Placement = "shared"
    """shared: the training ranks sample as well, in turn; apart: processes of their own sample, in parallel with
    training where `rl.lag` is 1 or more.
    """
    ranks: int | None = None
    """Ranks that sample, where they are apart; none uses `tp` of them."""
    tp: int = 1
    """Ranks that share a sampler's model; divides the number of sampling ranks."""
    pages: int | None = None
    """Pages of a sampler's KV cache; none uses a quarter of the free memory."""
    requests: int = 64
    """The most answers that a sampler computes at once."""
    timeout_s: float = 600.0
    """Time limit in seconds of waiting for another lane."""
    reply_timeout_s: float = 60.0
    """Time limit in seconds of the environment's task and reply; then the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRecipe(Recipe):
    """A complete recipe."""

    data: ProposedData = field(default_factory=lambda: ProposedData(**USUAL["data"]))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(**USUAL["train"]))
    state: StateConfig = field(default_factory=lambda: StateConfig(**USUAL["state"]))
    rl: RlConfig = field(default_factory=RlConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grade: GradeConfig = field(default_factory=GradeConfig)


def read_rl(path: Path) -> RlRecipe:
    """The recipe in a TOML file; raises as ``recipe.read`` does."""
    return read(RlRecipe, USUAL, path)


def check_rl(rl: RlConfig, rollout: RolloutConfig) -> None:
    """Check the settings.

    Raises:
        ConfigError: names the field, its value and the rule.
    """
    if not rl.environment:
        raise ConfigError(
            "rl.environment is empty; name a Python file with task(index, seed) and grade(task, rollout)."
        )
    if rl.group < 2:
        raise ConfigError(
            f"rl.group = {rl.group}: the answers of a group are compared with each other; set it to 2 or more."
        )
    for name, value, least in (
        ("rl.groups", rl.groups, 1),
        ("rl.rows", 1 if rl.rows is None else rl.rows, 1),
        ("rl.lag", rl.lag, 0),
        ("rl.window", rl.window, 0),
        ("rollout.max_tokens", rollout.max_tokens, 1),
        ("rollout.turns", rollout.turns, 1),
        ("rollout.requests", rollout.requests, 1),
        ("rollout.tp", rollout.tp, 1),
        ("rollout.ranks", rollout.tp if rollout.ranks is None else rollout.ranks, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} = {value} must be at least {least}.")
    _check_placement(rl, rollout)
    if rl.surrogate == "score" and rl.ratio == "sequence":
        raise ConfigError(
            "rl.surrogate = 'score' with rl.ratio = 'sequence': score has no ratio; set rl.ratio = 'token', or "
            "rl.surrogate to clip."
        )
    if not 0.0 < rl.clip_low <= 1.0:
        raise ConfigError(f"rl.clip_low = {rl.clip_low} must be above 0 and at most 1: a ratio is never below 0.")
    if not rl.kl_coef >= 0.0:
        raise ConfigError(f"rl.kl_coef = {rl.kl_coef} must be 0 or more.")
    for name, number in (
        ("rl.clip_high", rl.clip_high),
        ("rollout.temperature", rollout.temperature),
        ("rollout.timeout_s", rollout.timeout_s),
        ("rollout.reply_timeout_s", rollout.reply_timeout_s),
    ):
        if not number > 0.0:
            raise ConfigError(f"{name} = {number} must be above 0.")


def _check_placement(rl: RlConfig, rollout: RolloutConfig) -> None:
    if rl.window and rollout.placement == "shared":
        raise ConfigError(
            f"rl.window = {rl.window} with rollout.placement = 'shared': ranks that sample and train in turn have all "
            "groups of a step; set rl.window = 0, or rollout.placement to apart."
        )
    if rl.window > rl.lag:
        raise ConfigError(
            f"rl.window = {rl.window} is more than rl.lag = {rl.lag}: no later step is sampled that far ahead; set "
            f"rl.window to {rl.lag} or less."
        )
    if rollout.ranks is not None and rollout.placement == "shared":
        raise ConfigError(
            f"rollout.ranks = {rollout.ranks} with rollout.placement = 'shared': the ranks that train sample, all of "
            "them; leave it out, or set rollout.placement to apart."
        )
    if rollout.ranks is not None and rollout.ranks % rollout.tp:
        raise ConfigError(
            f"rollout.tp = {rollout.tp} does not divide rollout.ranks = {rollout.ranks}; set rollout.ranks to a "
            f"multiple of {rollout.tp}."
        )
