"""The run directory's files: where each lies, and how one is written whole."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import disk_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where the parts of a run lie."""

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
        """From what its step was predicted: the plan that ran, and the machine as its ranks measured it."""
        return self.root / "prediction.toml"

    @property
    def trace(self) -> Path:
        """When each instruction of the last step ran."""
        return self.root / "trace.json"

    @property
    def steps(self) -> Path:
        """When each instruction of the last steps ran on every rank, once it was asked for; for Perfetto."""
        return self.root / "steps.json"

    @property
    def fault(self) -> Path:
        """What every rank did when the run failed last."""
        return self.root / "fault.json"

    @property
    def doctor(self) -> Path:
        """What the doctor says of the run, once it was asked for as a page."""
        return self.root / "doctor.html"

    @property
    def metrics(self) -> Path:
        """One JSON object for each event."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """What the model wrote after each checkpoint, one JSON object for each."""
        return self.root / "samples.jsonl"

    @property
    def report(self) -> Path:
        """The page of its curves, and of what happened."""
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def trackers(self) -> Path:
        """By which trackers of others know the run."""
        return self.root / "trackers.json"

    @property
    def lock(self) -> Path:
        """Who writes to the directory now."""
        return self.root / "run.lock"

    @property
    def profiles(self) -> Path:
        """What torch's profiler saw of chosen steps, a trace of each and rank; for Perfetto."""
        return self.root / "profiles"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints."""
        return self.root / "checkpoints"


def write_whole(path: Path, text: str, *, makes_folder: bool = False) -> None:
    """Write a file; it is the new one or still the old one, never a part of either.

    Args:
        path: of the file.
        text: of it.
        makes_folder: whether its folder is made where it is not there: never a run's own, which may have been moved.

    Raises:
        DiskFault: the disk is full or broken, or the folder is not there.
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
