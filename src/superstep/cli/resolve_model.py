"""What is named to be served: a run's newest checkpoint, or a folder as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from superstep.errors import ConfigError, StateError
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.base_file import read_base
from superstep.train.weights.weights_folder import newest_checkpoint


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to be served.

    Attributes:
        folder: of its weights.
        name: that it goes by.
        run: how it was trained; None for a folder that is no run's.
        root: the run, or the folder itself.
    """

    folder: Path
    name: str
    run: RunConfig | None
    root: Path


def find_model(path: Path) -> ServedModel:
    """The model that a path names.

    Raises:
        StateError: there is none.
        ConfigError: it is a model of the user's own, whose attention the engine does not know.
    """
    if not path.exists():
        raise StateError(f"'{path}' is not there; name a run, a checkpoint or a Hugging Face folder.")
    run = RunFolder(root=path)
    if not run.config.is_file():
        return ServedModel(path, path.resolve().name, None, path)
    config = read_config(run.config)
    if config.model.source is not None:
        raise ConfigError(
            f"'{path}' is of a model of your own ({config.model.source}): the engine keeps keys of the decoder alone; "
            "superstep sample draws from it."
        )
    if config.lora is not None:
        refuse_adapter(path)
    return ServedModel(newest_checkpoint(path), path.resolve().name, config, path)


def refuse_adapter(run: Path) -> NoReturn:
    """A run that trained an adapter is no model.

    Raises:
        ConfigError: saying what is.
    """
    newest = newest_checkpoint(run)
    named = f"{run.resolve().name}={newest}"
    raise ConfigError(
        f"'{run}' trained an adapter, which is no model by itself: serve its base with it, superstep serve "
        f"{read_base(newest).folder} --serve.adapters {named}, or merge both, superstep tune merge {run} --out DIR."
    )
