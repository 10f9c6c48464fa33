"""The model that a path names, a run's newest checkpoint or the folder itself, and whether it can be served. Without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from superstep.errors import ConfigError, StateError
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.config import NGRAM, ServeConfig, check_ranges, check_served, check_vocab, fast, plan_of
from superstep.serve.scheduling.lora_registry import check_names
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.base_file import read_base
from superstep.train.weights.weights_folder import newest_checkpoint


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to be served.

    Attributes:
        folder: of its weights.
        name: for clients.
        run: its training; None for a folder without a run.
        root: the run, or the folder itself.
    """

    folder: Path
    name: str
    run: RunConfig | None
    root: Path


def find_model(path: Path, name: str | None = None) -> ServedModel:
    """The model that a path names.

    Args:
        path: of a run, a checkpoint or a Hugging Face folder.
        name: for clients; None uses the folder's.

    Raises:
        StateError: there is none.
        ConfigError: it is a user's own model, with an attention that the engine does not support.
    """
    if not path.exists():
        raise StateError(f"'{path}' is not there; name a run, a checkpoint or a Hugging Face folder.")
    run = RunFolder(root=path)
    if not run.config.is_file():
        return ServedModel(path, name or path.resolve().name, None, path)
    config = read_config(run.config)
    if config.model.source is not None:
        raise ConfigError(
            f"'{path}' is of a model of your own ({config.model.source}): the engine keeps keys of the decoder alone; "
            "superstep sample draws from it."
        )
    if config.lora is not None:
        refuse_adapter(path)
    return ServedModel(newest_checkpoint(path), name or path.resolve().name, config, path)


def refuse_adapter(run: Path) -> NoReturn:
    """Refuse a run that trained an adapter, which is no model.

    Raises:
        ConfigError: names the way to serve it.
    """
    newest = newest_checkpoint(run)
    named = f"{run.resolve().name}={newest}"
    raise ConfigError(
        f"'{run}' trained an adapter, which is not a complete model: serve its base model with it, superstep serve "
        f"{read_base(newest).folder} --serve.adapters {named}, or merge both, superstep tune merge {run} --out DIR."
    )


def guesser_folder(speculate: str) -> str:
    """``ServeConfig.speculate`` with a run replaced by its newest checkpoint's folder."""
    return speculate if speculate in ("", NGRAM) else str(find_model(Path(speculate)).folder)


def check_model(model: ServedModel, serve: ServeConfig) -> Resolved:
    """The plan that cuts a model for serving.

    Raises:
        ConfigError: it cannot be served with these settings.
        StateError: its folder holds no model.
    """
    check_ranges(serve)
    plan = plan_of(model.folder, serve)
    check_served(plan, serve)
    check_names(model.name, [name for name, _ in serve.adapters])
    if serve.speculate not in ("", NGRAM):
        check_vocab(plan_of(Path(serve.speculate), fast(serve)), plan, serve.speculate)
    return plan
