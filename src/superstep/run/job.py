"""The job of a run's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from superstep.cost.program.time.operation import UnitOperations
from superstep.plan.config import DeviceKind
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.recover import Recovery
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.train.policy.sequence_loss import SequenceLoss
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The job that every rank receives."""

    run: Resolved
    folder: RunFolder
    corpus: Path
    checkpoint: Path | None
    was_complete: bool
    """Whether it continues beyond an earlier last step: then a demo's hints were shown already."""
    operations: tuple[UnitOperations, ...] | None
    """Operations of the units; None if they are not known before they run."""
    flops_per_token: float | None
    verb: str = "train"
    """The words after superstep that resume the run."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts to write into the run directory, by name."""
    sequence_loss: SequenceLoss | None = None
    """A loss of whole sequences; None for a loss of each target."""
    snapshots: Handles | None = None
    """The ranks' memories that outlive them, if any."""
    recovered: Recovery | None = None
    """After a loss of ranks: the lost ones, and the snapshot to resume from instead of the checkpoint."""
    requested: Resolved | None = None
    """The requested run, if the current plan has fewer ranks: the directory keeps the requested one."""
    epoch: int = 0
    """Number of starts by launchers of several hosts: none of them has all memories, and ranks write checkpoints. 0
    with one launcher.
    """
    began_at_s: float = 0.0
    """Start of the launch, in seconds since 1970."""
    earlier_s: float = 0.0
    """Seconds of the run's earlier launches."""


def device_setting(job: TrainJob | None) -> DeviceKind | None:
    """The device of a run's settings."""
    return None if job is None else job.run.config.plan.device


def watch_of(job: TrainJob) -> FolderWatch:
    """A watch of the run directory, with the files that a replacement needs for resuming."""
    return FolderWatch(
        job.folder, {job.folder.config.name: write_config((job.requested or job.run).config), **job.files}
    )
