"""Paths of the run directory's files, and atomic writing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import disk_fault
from superstep.plan.config import RunConfig


def tokens_folder(config: RunConfig, root: Path) -> Path:
    """The folder of token files of the run in ``root``."""
    return Path(config.data.cache) if config.data.cache else root / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of a run's files."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "run.toml"

    @property
    def program(self) -> Path:
        """The text of the step program."""
        return self.root / "program.txt"

    @property
    def prediction(self) -> Path:
        """Inputs of the predicted step: the plan, and the machine as its ranks measured it."""
        return self.root / "prediction.toml"

    @property
    def trace(self) -> Path:
        """Times of each instruction of the last step."""
        return self.root / "trace.json"

    @property
    def steps(self) -> Path:
        """Times of each instruction of the last steps on every rank, on request; for Perfetto."""
        return self.root / "steps.json"

    @property
    def fault(self) -> Path:
        """What every rank did at the last failure."""
        return self.root / "fault.json"

    @property
    def doctor(self) -> Path:
        """The doctor's page, on request."""
        return self.root / "doctor.html"

    @property
    def metrics(self) -> Path:
        """One JSON object for each event."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Generated texts after each checkpoint, one JSON object for each."""
        return self.root / "samples.jsonl"

    @property
    def report(self) -> Path:
        """The page with curves and events."""
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def trackers(self) -> Path:
        """Ids of the run in experiment trackers."""
        return self.root / "trackers.json"

    @property
    def lock(self) -> Path:
        """The owner of the directory."""
        return self.root / "run.lock"

    @property
    def profiles(self) -> Path:
        """Traces of torch's profiler for chosen steps and each rank; for Perfetto."""
        return self.root / "profiles"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"


def write_whole(path: Path, text: str, *, makes_folder: bool = False) -> None:
    """Write a file atomically: it is the old or the new one, never a part of either.

    Args:
        path: of the file.
        text: of it.
        makes_folder: whether to create its folder: never for a run's own, which may have been moved.

    Raises:
        DiskFault: the disk is full or broken, or the folder is missing.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise disk_fault(error, path) from error
