"""Copiers: content of storages from the device to another place, and back.

DiskCopier    a thread for each direction, and a file
HostCopier    a stream for each direction of a GPU, and pinned memory, which is kept for the next step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from superstep.comm.collectives import PendingCollective
from superstep.comm.device import Device
from superstep.engine.activations.direct_file import DirectFile
from superstep.engine.flat.snapshots import UnitCopy
from superstep.errors import ConfigError
from superstep.plan.resolution.fill_plan import host_error
from superstep.plan.resolution.resolve import Resolved


class Copier(Protocol):
    """Content elsewhere. Contents are bytes of whole storages, [n]; copies of a direction run in order."""

    def allocate(self, size: int) -> Any:  # noqa: ANN401
        """A part for ``size`` bytes."""

    def store(self, parts: Sequence[tuple[Any, Tensor]]) -> PendingCollective:
        """Start to write contents, each to its part."""

    def load(self, parts: Sequence[tuple[Any, Tensor]]) -> PendingCollective:
        """Start to read parts, each into its tensor."""

    def free(self, part: Any) -> None:  # noqa: ANN401
        """Let another part take its place."""


class DiskCopier:
    """To an unnamed file.

    Args:
        folder: of the file.
        device: of the contents.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        self._file = DirectFile(folder)
        self._device = device
        self._out = ThreadPoolExecutor(1, "offload", device.make_current)
        self._in = ThreadPoolExecutor(1, "reload", device.make_current)
        self.allocate, self.free = self._file.allocate, self._file.free

    def store(self, parts: Sequence[tuple[Any, Tensor]]) -> PendingCollective:
        return self._start(self._out, self._file.write, parts)

    def load(self, parts: Sequence[tuple[Any, Tensor]]) -> PendingCollective:
        return self._start(self._in, self._file.read, parts)

    def _start(
        self, thread: ThreadPoolExecutor, copy: Callable[[Any, Tensor], None], parts: Sequence[tuple[Any, Tensor]]
    ) -> PendingCollective:
        """Copy parts in a thread, after what the compute stream of a GPU has yet to do."""
        issued = None if self._device.kind == "cpu" else torch.cuda.current_stream().record_event()

        def run() -> tuple[float, float]:
            start_s = time.perf_counter()
            if issued is None:
                self._copy(copy, parts)
            else:
                issued.synchronize()
                with torch.cuda.stream(torch.cuda.Stream(device=self._device.torch)):
                    self._copy(copy, parts)
                    torch.cuda.current_stream().synchronize()
            return start_s, time.perf_counter()

        return UnitCopy(thread.submit(run))

    def _copy(self, copy: Callable[[Any, Tensor], None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        for part, content in parts:
            copy(part, content)


def open_copiers(run: Resolved, device: Device) -> dict[int, Copier]:
    """The copier of each unit that moves what it keeps. Raises ConfigError: the device has no such place."""
    places = set(run.plan.activations)
    if "host" in places and device.kind == "cpu":
        raise ConfigError(host_error())
    known: dict[str, Copier] = {}
    if "disk" in places:
        known["disk"] = DiskCopier(Path(run.config.state.dir), device)
    if "host" in places:
        known["host"] = HostCopier(device)
    return {unit: known[run.plan.activations[unit]] for unit in run.plan.offloaded}


@dataclass(frozen=True, slots=True)
class StreamCopy:
    """Copies on a stream of a GPU, to the host or from it."""

    event: torch.cuda.Event
    is_out: bool

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def is_done(self) -> bool:
        return bool(self.event.query())


class HostCopier:
    """To pinned memory of a GPU's host.

    Args:
        device: a GPU.
    """

    def __init__(self, device: Device) -> None:
        self._out = torch.cuda.Stream(device=device.torch)
        self._in = torch.cuda.Stream(device=device.torch)
        self._spare: dict[int, list[Tensor]] = {}

    def allocate(self, size: int) -> Tensor:
        spare = self._spare.get(size)
        return spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def store(self, parts: Sequence[tuple[Any, Tensor]]) -> PendingCollective:
        return self._start(self._out, [(content, part) for part, content in parts])

    def load(self, parts: Sequence[tuple[Any, Tensor]]) -> PendingCollective:
        return self._start(self._in, parts)

    def free(self, part: Tensor) -> None:
        self._spare.setdefault(part.numel(), []).append(part)

    def _start(self, stream: torch.cuda.Stream, copies: Sequence[tuple[Tensor, Tensor]]) -> PendingCollective:
        """Copy each first tensor to its second one, after what the compute stream has yet to do."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
            return StreamCopy(stream.record_event(), is_out=stream is self._out)
