"""Profile of a step by torch's profiler: operations and kernels of a rank, under their instructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from superstep.comm.collectives import PendingCollective
from superstep.comm.device import Device
from superstep.engine.instruction_timer import Recorder, TimedInstruction
from superstep.errors import disk_fault
from superstep.program.instructions import Instruction
from superstep.program.text import describe


@dataclass(frozen=True, slots=True)
class Profiler:
    """Profiles the chosen steps.

    Attributes:
        steps: the chosen steps.
        folder: for the traces, one of each step and rank.
        rank: this one.
        device: of this rank.
        instructions: of a step on this rank.
    """

    steps: tuple[int, ...]
    folder: Path
    rank: int
    device: Device
    instructions: Sequence[Instruction]

    @contextmanager
    def watching(self, step: int, record: Recorder) -> Iterator[Recorder]:
        """Within the block, run the step with the yielded recorder; then its trace is written.

        Raises:
            Fault: the disk is full or broken.
        """
        if step not in self.steps:
            yield record
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.kind == "cuda" else [])]
        with profile(activities=activities) as profiler:
            yield _Named(record, self.instructions)
            self.device.synchronize()
        path = self.folder / f"step-{step:06d}-rank-{self.rank}.json"
        partial = path.with_name(f"{path.name}.partial")
        try:
            self.folder.mkdir(exist_ok=True)  # not the run's own folder: a removed one is not made again
            profiler.export_chrome_trace(str(partial))
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                partial.unlink()
            raise disk_fault(error if isinstance(error, OSError) else OSError(str(error)), path) from error


class _Named:
    """A recorder that makes each instruction a range of the trace."""

    def __init__(self, inner: Recorder, instructions: Sequence[Instruction]) -> None:
        self._inner, self._instructions = inner, instructions
        self._range = record_function("")

    @property
    def issued(self) -> int:
        return self._inner.issued

    def begin(self) -> None:
        self._range = record_function(describe(self._instructions[self._inner.issued]))
        self._range.__enter__()
        self._inner.begin()

    def end(self, instruction: Instruction, under_way: PendingCollective | None) -> None:
        self._inner.end(instruction, under_way)
        self._range.__exit__(None, None, None)

    def ran(self) -> list[TimedInstruction]:
        return self._inner.ran()
