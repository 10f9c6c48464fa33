"""What a tuned run takes from its initial model: weights, shape, tokenizer. Without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from superstep.errors import ConfigError
from superstep.plan.config import ModelConfig, RunConfig
from superstep.plan.config_io import read_config
from superstep.plan.model.multimodal.families import find_shape
from superstep.train.run_folder.run_paths import RunFolder, tokens_folder
from superstep.tune.config import USUAL_TOKENS, TuneConfig, read_recipe
from superstep.tune.recipe import RECIPE, run_with, start_folder


def run_of(config: TuneConfig) -> RunConfig:
    """The run of a recipe. A resumed run keeps its initial model.

    Raises:
        ConfigError: the recipe is invalid, or differs from the run's own.
        StateError: there is no initial model.
    """
    folder = RunFolder(root=Path(config.state.dir))
    saved = folder.root / RECIPE
    if config.state.existing != "resume" or not folder.config.is_file():
        return start_from(config)
    if not saved.is_file():
        raise ConfigError(
            f"state.dir = '{folder.root}' holds a run that is no tuned one; go on with it by superstep train, or name "
            "another --state.dir."
        )
    before, run = read_recipe(saved), read_config(folder.config)
    before = replace(before, sft=replace(before.sft, epochs=config.sft.epochs))  # a run may be extended
    for name in ("start", "sft", "dpo"):
        was, now = getattr(before, name), getattr(config, name)
        if was != now:
            raise ConfigError(
                f"{name} = {now!r}, and the run in state.dir = '{folder.root}' was started with {was!r}; it cannot "
                "change within a run. Set it back, or name another --state.dir."
            )
    return _run_on(config, run.model, config.data.tokenizer or run.data.tokenizer)


def start_from(config: TuneConfig) -> RunConfig:
    """The run of a recipe, with the model of ``start``.

    Raises:
        ConfigError: the recipe names no start, or another model besides.
        StateError: there is no model.
    """
    folder = start_folder(config.start)
    if config.model != ModelConfig():
        raise ConfigError(
            f"[model] is given beside start = '{config.start}', whose model is tuned as it is; leave the table out."
        )
    if config.data.packed and not config.data.document_mask:
        raise ConfigError(
            "data.document_mask = false would show a conversation those beside it; leave it out, or set data.packed to "
            "false for one conversation in each sequence."
        )
    model = ModelConfig(name=str(folder / "config.json"), weights=str(folder))
    return _run_on(config, model, config.data.tokenizer or str(folder / "tokenizer.json"))


def _run_on(config: TuneConfig, model: ModelConfig, tokenizer: str | None) -> RunConfig:
    """The run of a recipe on a model. Conversations of one that reads more than text are samples."""
    shape = find_shape(model)
    if shape is None:
        return run_with(config, model, tokenizer, USUAL_TOKENS)
    if not config.data.packed:
        raise ConfigError(
            f"data.packed = false with start = '{config.start}': conversations with pictures or sounds are packed, and "
            "kept apart; leave it out."
        )
    run = run_with(config, model, tokenizer, USUAL_TOKENS, shape.decoder)
    prepared = tokens_folder(run, Path(config.state.dir))
    return replace(run, data=replace(run.data, source=str(prepared), document_mask=False))
