"""Check a run's initial weights before any rank is launched."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import ConfigError
from superstep.model.hf import check_weights, open_weights
from superstep.plan.resolution.resolve import Resolved
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
