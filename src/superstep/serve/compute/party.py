"""What the ranks that share a model do together beside computing steps: each does its part, or none has done it.

    rank 0   Read ......... steps ......... Switch        a thread of each rank reads beside the steps
    rank 1   Read ......... steps ......... Switch        all say whether they could; then all switch, or none

Orders come between steps, to all ranks in one row, and so every rank does them before the same step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from superstep.errors import Fault, StateError, SuperstepError
from superstep.runtime.collectives import stack_ranks
from superstep.runtime.device import Device
from superstep.runtime.mesh import Group
from superstep.serve.compute.renewal import Beside, Memory
from superstep.serve.weights import Source, given, hold, open_source

SAID_BYTES = 1024
"""The most of a reason that a rank tells the others."""

FAILURES = (SuperstepError, SafetensorError, OSError, RuntimeError, ValueError, MemoryError)
"""What weights that cannot be read, or have no room, are met with."""

Tensors = Mapping[str, Tensor]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Begin to read weights beside those in place."""

    path: str


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Put what was read into place, if every rank could read it."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Let go of what was read."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give memory back."""

    keeps_weights: bool


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Take it again, with the weights of a path where there are none."""

    path: str | None


Order = Read | Switch | Forget | Sleep | Wake
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Order).decode


class Reading(threading.Thread):
    """Reads weights beside those in place.

    Args:
        memory: of this rank.
        device: where that is.
        source: what to read.
        is_named: whether this rank is the one that finds out what the weights are called.
    """

    def __init__(self, memory: Memory, device: Device, source: Path | Tensors, *, is_named: bool) -> None:
        super().__init__(name="weights", daemon=True)
        self.source: Source | None = None
        self.beside: Beside | None = None
        self.version = ""
        self.why = ""
        self._memory, self._device = memory, device
        self._from = source
        self._is_named = is_named

    def run(self) -> None:
        """Read; ``why`` says what went wrong."""
        try:
            self._device.make_current()
            self.source = opened(self._from)
            if self._is_named:
                self.version = self.source.version()
            self.beside = self._memory.read(self.source.weights)
        except FAILURES as error:
            self.why = reason(error)

    def close(self) -> None:
        """Let go of everything."""
        self.beside = None
        if self.source is not None:
            self.source.close()


class Party:
    """One rank's part.

    Args:
        memory: of this rank.
        source: where the weights in place came from at first.
        group: the ranks that share the model; None where there is one.
        device: where they compute.
    """

    def __init__(self, memory: Memory, source: Path, group: Group | None, device: Device) -> None:
        self.memory = memory
        self.path = source
        self._source: Source | Path = source
        self._lock = hold(source)
        self._group = group
        self._device = device
        self._reading: Reading | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is rank 0's."""
        return self._group is None or self._group.rank() == 0

    @property
    def reading(self) -> Reading | None:
        """What is being read, or was and is not yet in place."""
        return self._reading

    def obey(self, order: Order) -> None:
        """Do what rank 0 says. What all could not do is rank 0's to tell."""
        try:
            match order:
                case Read(path):
                    self.read(Path(path))
                case Switch():
                    self.switch()
                case Forget():
                    self.forget()
                case Sleep(keeps_weights):
                    self.memory.sleep(keeps_weights=keeps_weights)
                case Wake(path):
                    self.wake(None if path is None else Path(path))
        except StateError:
            if self.is_first:
                raise

    def check(self, changes: int) -> None:
        """Hold a step against the weights in place, before it is computed.

        Raises:
            Fault: it is made for others.
        """
        if changes != self.memory.changes:
            rank = 0 if self._group is None else self._group.rank()
            raise Fault(
                f"a step is made for the weights after {changes} changes, and those after {self.memory.changes} are in "
                "place.",
                rank=rank,
            )

    def read(self, source: Path | Tensors) -> None:
        """Begin to read."""
        assert self._reading is None, "one at a time"
        self._reading = Reading(self.memory, self._device, source, is_named=self.is_first)
        self._reading.start()

    def switch(self) -> None:
        """Put what was read into place.

        Raises:
            StateError: some rank could not read it; all are as they were.
        """
        reading = self._reading
        assert reading is not None, "something was read"
        reading.join()
        why = self._first(reading.why)
        if why:
            self.forget()
            raise StateError(why)
        assert reading.beside is not None
        assert reading.source is not None
        self.memory.switch(reading.beside)
        self._reading, reading.beside = None, None
        self._keep(reading.source)

    def forget(self) -> None:
        """Let go of what was read."""
        if self._reading is not None:
            self._reading.join()
            self._reading.close()
            self._reading = None

    def wake(self, path: Path | Tensors | None, known: str = "") -> str:
        """Take memory again; what new weights are called, empty where there are none.

        Args:
            path: of the weights, or themselves.
            known: what they are called; empty finds out.

        Raises:
            StateError: the weights cannot be served; all ranks sleep on.
        """
        why, version, source = "", "", None
        changes = self.memory.changes
        try:
            if not self.memory.has_weights or path is not None:
                source = opened(path) if path is not None else self._again()
                version = known or (source.version() if self.is_first else "")
            self.memory.wake(None if source is None else source.weights)
        except FAILURES as error:
            why = reason(error)
        why = self._first(why)
        if why:
            self.memory.sleep(keeps_weights=self.memory.has_weights and source is None)
            self.memory.changes = changes
            if source is not None and source is not self._source:
                source.close()
            raise StateError(why)
        if source is not None:
            self._keep(source)
        return version

    def _again(self) -> Source:
        return opened(self._source) if isinstance(self._source, Path) else self._source

    def _keep(self, source: Source) -> None:
        """Hold on to where the weights came from: who sleeps without them needs it once more."""
        if self._lock is not None:
            self._lock.close()
        if isinstance(self._source, Source) and self._source is not source:
            self._source.close()
        self._source = source

    def _first(self, why: str) -> str:
        """The first reason that a rank has, on every rank; empty where none has."""
        if self._group is None:
            return why
        said = torch.zeros(SAID_BYTES, dtype=torch.uint8)
        text = why.encode()[:SAID_BYTES]
        said[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        rows = stack_ranks(said.to(self._device.torch), self._group).cpu()
        told = (bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows)
        return next((one for one in told if one), "")


def opened(source: Path | Tensors) -> Source:
    """A path's weights, or tensors of this process."""
    return open_source(source) if isinstance(source, Path) else Source(given(source))


def reason(error: Exception) -> str:
    """What is told of weights that cannot be served."""
    return str(error) if isinstance(error, SuperstepError) else f"the weights cannot be read: {error!r}."


def order_to_numbers(order: Order) -> list[int]:
    """An order as ranks send it to each other."""
    return list(encode(order))


def order_of(numbers: list[int]) -> Order:
    """The order that ``order_to_numbers`` wrote."""
    order: Order = decode(bytes(numbers))
    return order
