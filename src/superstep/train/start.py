"""What a run may begin with: the weights of another run, of a checkpoint, or of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import ConfigError, StateError
from superstep.model.hf import check_weights, open_weights
from superstep.plan.resolve import Resolved
from superstep.state.folders import checkpoints
from superstep.state.verify import glance
from superstep.train.model import shapes_of
from superstep.train.run_folder import RunFolder


def weights_of(path: Path) -> Path:
    """The folder of weights that a path names: the newest checkpoint of a run, else the folder itself.

    Raises:
        StateError: it is not there, or a run without a checkpoint.
    """
    if not path.exists():
        raise StateError(f"'{path}' is not there; name a run, a checkpoint or a Hugging Face folder.")
    return newest_checkpoint(path) if RunFolder(root=path).config.is_file() else path


def check_start(run: Resolved) -> None:
    """See that the weights of ``model.weights`` are the model's, before any rank is launched.

    Raises:
        ConfigError: adapters are to be trained, and there are no weights that they would add to.
        StateError: there are none, or tensors are missing, surplus or of another shape.
    """
    if run.config.model.weights is None and run.config.lora is not None:
        raise ConfigError(
            "lora without model.weights: adapters are trained beside weights that are given; set model.weights to a "
            "run, a checkpoint or a Hugging Face folder, or leave [lora] out."
        )
    if run.config.model.weights is not None:
        check_weights(open_weights(weights_of(Path(run.config.model.weights))), shapes_of(run))


def newest_checkpoint(run: Path) -> Path:
    """The last checkpoint that a run wrote. Its tensors are not read: who reads them holds them against their hashes.

    Raises:
        StateError: it has none yet.
        Damaged: a glance shows that it is not what was written. An older one is not what was asked for.
    """
    found = checkpoints(RunFolder(root=run).checkpoints)
    if not found:
        raise StateError(f"'{run}' has no checkpoint yet; train it for at least state.save_every steps.")
    glance(found[-1])
    return found[-1]
