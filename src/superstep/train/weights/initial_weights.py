"""A run's initial weights: checked before any rank is launched, and read by the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from superstep.engine.engine import Engine
from superstep.errors import ConfigError, StateError
from superstep.model.files.hf import check_weights, open_weights
from superstep.plan.resolution.resolve import Resolved
from superstep.state.all_or_none import Peers, together
from superstep.state.load_weights import fill
from superstep.state.verify import verify_weights
from superstep.train.weights.lora_base import begin_base, files_of
from superstep.train.weights.model import shapes_of
from superstep.train.weights.weights_folder import weights_of


def check_start(run: Resolved) -> None:
    """Check that the weights of ``model.weights`` fit the model, before any rank is launched.

    Raises:
        ConfigError: adapters are to be trained, and there are no base weights.
        StateError: weights are missing, or tensors are missing, surplus or of another shape.
    """
    if run.config.model.weights is None and run.config.lora is not None:
        raise ConfigError(
            "lora without model.weights: adapters are trained beside weights that are given; set model.weights to a "
            "run, a checkpoint or a Hugging Face folder, or leave [lora] out."
        )
    if run.config.model.weights is not None:
        check_weights(open_weights(weights_of(Path(run.config.model.weights))), shapes_of(run))


def fill_start(
    run: Resolved, engine: Engine, peers: Peers, folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Read the weights of a folder, or of a run's newest checkpoint. Every rank calls this together.

    Returns:
        With adapters, which are trained on top of the weights: texts of the files that name these, for checkpoints.

    Raises:
        StateError: the weights are missing, or belong to another model.
    """

    def unreadable(error: Exception) -> StateError:
        return StateError(f"model.weights = '{folder}' cannot be read ({error}).")

    def find() -> Path | None:
        return None if peers.rank else weights_of(folder)

    # One rank decides: another run may be writing the next checkpoint.
    weights = together(peers, find, unreadable, Path | None)[0]
    assert weights is not None
    verify_weights(weights, peers)
    if run.config.lora is not None:
        return files_of(run, begin_base(run, engine, peers, weights))
    fill(weights, engine.pieces(("weight",)), shapes, peers)
    return {}
