"""ObserveConfig: what a run reports, and where to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tracker = Literal["wandb", "mlflow", "trackio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What a run reports."""

    tensorboard: bool = True
    """Whether TensorBoard's event files are written into the run directory."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers that also receive the curves, through their installed clients: wandb (Weights & Biases), mlflow,
    trackio. Address and account are their own settings.
    """
    project: str = "superstep"
    """The run's project there; MLflow calls it an experiment."""
    log_every: int = 10
    """Steps between lines where the output is no terminal, and between reports of the routers."""
    peak_flops: float | None = None
    """FLOP/s of one rank's device that MFU is measured against; none looks it up, or measures it on a CPU."""
    sample: str | None = None
    """A prompt that the model continues after each checkpoint, in a process beside the run, for the report."""
    profile: tuple[int, ...] = ()
    """Steps that torch's profiler records: of each, every rank writes a trace into the run directory's profiles, which
    Perfetto opens. superstep train takes them as --profile too.
    """
