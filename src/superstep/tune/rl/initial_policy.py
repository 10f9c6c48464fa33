"""Initial model and checks of a run of reinforcement learning. Without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from superstep.data.tokenizer import load_tokenizer
from superstep.errors import ConfigError
from superstep.plan.config import ProposedRun, RunConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.recipe import RECIPE, refuse_own_loss, run_with, start_folder
from superstep.tune.rl.config import USUAL_TOKENS, RlConfig, RlRecipe, RolloutConfig, check_rl, read_rl


def with_start(proposed: ProposedRun, rl: RlConfig, start: str) -> tuple[RunConfig, Path]:
    """A proposed run with the model, the tokenizer and the weights of its start.

    Returns:
        The configuration, and the folder.

    Raises:
        ConfigError: no start is named.
        StateError: it is no model.
    """
    folder = start_folder(start)
    model = replace(proposed.model, name=str(folder / "config.json"), weights=str(folder))
    config = run_with(proposed, model, str(folder / "tokenizer.json"), USUAL_TOKENS)
    changed = replace(
        config,
        data=replace(config.data, document_mask=True),
        train=replace(config.train, batch_sequences=rl.rows or rl.groups * rl.group),
    )
    return changed, folder


def check_tokenizer(start: str, config: RunConfig) -> None:
    """Check that the model has a row for every id of its tokenizer.

    Args:
        start: of the recipe.
        config: of ``with_start``.

    Raises:
        ConfigError: it has not.
    """
    shape = shape_of(config.model)
    vocab = load_tokenizer(Path(str(config.data.tokenizer))).vocab
    if vocab > shape.vocab:
        raise ConfigError(
            f"start = '{start}': the tokenizer has {vocab} ids and the model {shape.vocab}; begin with a folder whose "
            f"tokenizer is the model's."
        )


def _check_base(config: RunConfig) -> None:
    if config.lora is not None and config.lora.base is not None:
        raise ConfigError(
            f"lora.base = '{config.lora.base}': a sampler has the base in the compute dtype, so that it answers by "
            "another policy than is trained; leave lora.base out."
        )


def check_run(config: RunConfig, rl: RlConfig, rollout: RolloutConfig) -> None:
    """Check that reinforcement learning supports a run's settings.

    Raises:
        ConfigError: it does not; names the field.
    """
    check_rl(rl, rollout)
    _check_base(config)
    refuse_own_loss(config.train, "tune rl")
    if config.numerics.compute == "fp16":
        raise ConfigError(
            "numerics.compute = 'fp16' is of superstep train, tune sft and tune dpo; set numerics.compute to bf16 or "
            "fp32 for tune rl."
        )
    if rl.window and config.numerics.exact:
        raise ConfigError(
            f"rl.window = {rl.window} with numerics.exact = true: what a step takes would depend on the clock; set "
            "rl.window = 0, or numerics.exact = false."
        )
    if config.data.sequence_tokens < 2 * rollout.turns:
        raise ConfigError(f"data.sequence_tokens = {config.data.sequence_tokens} has no room for an answer.")
    if config.train.elastic:
        raise ConfigError("train.elastic = true is of superstep train on several hosts; set it to false for tune rl.")
    if config.state.store is not None and rl.window:
        raise ConfigError(
            f"state.store with rl.window = {rl.window}: which steps have exchanged their tasks is in rollouts.jsonl, "
            "which no store has; set rl.window = 0, or leave state.store out."
        )


def check_same(recipe: RlRecipe, folder: RunFolder) -> None:
    """Check that a resumed run needs the same groups as the recorded ones.

    Raises:
        ConfigError: it does not; names the field.
    """
    saved = folder.root / RECIPE
    if not saved.is_file():
        return
    before = read_rl(saved)
    for section, name in (
        ("rl", "environment"),
        ("rl", "group"),
        ("rl", "groups"),
        ("rl", "lag"),
        ("rollout", "placement"),
    ):
        was, now = getattr(getattr(before, section), name), getattr(getattr(recipe, section), name)
        if was != now:
            raise ConfigError(
                f"{section}.{name} = {now!r}, and the run in state.dir = '{folder.root}' was started with {was!r}; it "
                "cannot change within a run. Set it back, or name another --state.dir."
            )
