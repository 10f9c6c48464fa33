"""Commands between steps on the ranks that share a model: all ranks apply a command, or none.

    rank 0   Read ......... steps ......... Switch        a thread of each rank reads during the steps
    rank 1   Read ......... steps ......... Switch        ranks agree on success; then all switch, or none

    rank 0   Sleep ... Read ......... Wake                the same without memory for weights: no steps meanwhile

All ranks receive the same sequence of steps and commands, so each command comes before the same step on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from superstep.comm.codec import Codec
from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.errors import Fault, StateError, SuperstepError
from superstep.serve.compute.runner.agreement import all_true, first_reason
from superstep.serve.compute.runner.weight_update import PendingWeights, RankMemory
from superstep.serve.files.reader import TIMEOUT_S, BackgroundReader
from superstep.serve.files.weights import LockedWeights, hold, open_source, weights_in_memory

FAILURES = (SuperstepError, SafetensorError, OSError, RuntimeError, ValueError, MemoryError)
"""Errors of weights that cannot be read, or do not fit into memory."""

Tensors = Mapping[str, Tensor]


class ReadWeights(msgspec.Struct, frozen=True, tag=True):
    """Start to read weights; None means those that were in place."""

    path: str | None


class AreWeightsRead(msgspec.Struct, frozen=True, tag=True):
    """Agree whether all ranks have finished reading: no rank waits for a slow disk."""


class SwitchWeights(msgspec.Struct, frozen=True, tag=True):
    """Install the weights, if every rank could read them."""


class ForgetWeights(msgspec.Struct, frozen=True, tag=True):
    """Drop the weights that were read."""


class SleepRanks(msgspec.Struct, frozen=True, tag=True):
    """Free memory."""

    keeps_weights: bool


class WakeRanks(msgspec.Struct, frozen=True, tag=True):
    """Allocate memory again, with the weights that were read, if every rank could read them."""


Order = ReadWeights | AreWeightsRead | SwitchWeights | ForgetWeights | SleepRanks | WakeRanks
ORDERS: Codec[Order] = Codec(Order)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that were read.

    Attributes:
        source: their source, kept locked.
        version: of the weights; empty where it was not needed.
        beside: this rank's part.
    """

    source: LockedWeights
    version: str
    beside: PendingWeights


class WeightReading:
    """A thread that reads weights into memory of their own, and can be cancelled.

    Args:
        memory: of this rank.
        device: of that memory.
        source: of the weights.
        is_named: whether to compute the weights' version.
        timeout_s: the longest time without progress.
    """

    def __init__(
        self,
        memory: RankMemory,
        device: Device,
        source: Path | Tensors | LockedWeights,
        *,
        is_named: bool,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        def read(progress: Callable[[], None]) -> LoadedWeights:
            device.make_current()
            weights = open_weights_source(source)
            try:
                weights.weights = weights.weights.watch(progress)
                version = weights.version() if is_named else ""
                return LoadedWeights(weights, version, memory.read(weights.weights))
            except BaseException:
                drop(weights)
                raise

        def drop(weights: LockedWeights) -> None:
            if weights is not source:  # another owner holds it
                weights.close()

        path = (
            source
            if isinstance(source, Path)
            else source.weights.path
            if isinstance(source, LockedWeights)
            else "tensors"
        )
        self.reader = BackgroundReader(path, read, timeout_s=timeout_s, drop=lambda late: drop(late.source))

    @property
    def is_over(self) -> bool:
        """Whether reading has finished or failed."""
        return self.reader.is_over

    @property
    def why(self) -> str:
        """The reason why the weights cannot be served; empty where they can. Waits for the end."""
        try:
            self.reader.result()
        except FAILURES as error:
            return reason(error)
        return ""

    @property
    def version(self) -> str:
        """The weights' version; empty where they cannot be served. Waits for the end."""
        return "" if self.why else self.reader.result().version

    def close(self) -> None:
        """Release everything."""
        if not self.why:
            self.reader.result().source.close()


class CommandChannel:
    """One rank's end.

    Args:
        memory: of this rank.
        source: of the first weights in place.
        group: the ranks that share the model; None for one rank.
        device: of the computation.
        read_timeout_s: the longest time that a reader may make no progress.
    """

    def __init__(
        self, memory: RankMemory, source: Path, group: Group | None, device: Device, read_timeout_s: float = TIMEOUT_S
    ) -> None:
        self.memory = memory
        self.path = source
        self._source: LockedWeights | Path = source
        self._lock = hold(source)
        self._group = group
        self._device = device
        self._read_timeout_s = read_timeout_s
        self._reading: WeightReading | None = None

    @property
    def is_first(self) -> bool:
        return self._group is None or self._group.rank() == 0

    @property
    def reading(self) -> WeightReading | None:
        """The reader of weights that are not yet in place."""
        return self._reading

    def obey(self, order: Order) -> None:
        """Apply a command of rank 0. Errors that all ranks share are reported by rank 0."""
        try:
            match order:
                case ReadWeights(path):
                    self.read(None if path is None else Path(path))
                case AreWeightsRead():
                    self.is_read()
                case SwitchWeights():
                    self.switch()
                case ForgetWeights():
                    self.forget()
                case SleepRanks(keeps_weights):
                    self.memory.sleep(keeps_weights=keeps_weights)
                case WakeRanks():
                    self.wake()
        except StateError:
            if self.is_first:
                raise

    def check(self, changes: int) -> None:
        """Check that a step was made for the weights in place.

        Raises:
            Fault: it was made for other weights.
        """
        if changes != self.memory.changes:
            rank = 0 if self._group is None else self._group.rank()
            raise Fault(
                f"a step is made for the weights after {changes} changes, and those after {self.memory.changes} are in "
                "place.",
                rank=rank,
            )

    def read(self, source: Path | Tensors | None, *, is_named: bool = True) -> None:
        """Start to read.

        Args:
            source: of the weights, or tensors; None means the weights that were in place.
            is_named: whether rank 0 computes the version.
        """
        assert self._reading is None, "one at a time"
        self._reading = WeightReading(
            self.memory,
            self._device,
            self._source if source is None else source,
            is_named=is_named and self.is_first,
            timeout_s=self._read_timeout_s,
        )

    def is_read(self) -> bool:
        """Whether every rank has finished reading."""
        assert self._reading is not None, "something is read"
        return all_true(self._reading.is_over, self._group, self._device)

    def switch(self) -> None:
        """Install the weights that were read.

        Raises:
            StateError: a rank could not read them; no rank is changed.
        """
        reading = self._reading
        assert reading is not None, "something was read"
        why = first_reason(reading.why, self._group, self._device)
        if why:
            self.forget()
            raise StateError(why)
        loaded = reading.reader.result()
        self.memory.switch(loaded.beside)
        self._reading = None
        self._keep(loaded.source)

    def forget(self) -> None:
        """Drop the weights that were read."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def wake(self) -> str:
        """Allocate memory again, with the weights that were read; returns their version, or "" without one.

        Raises:
            StateError: the weights cannot be served; all ranks stay asleep.
        """
        why, version, source = "", "", None
        changes = self.memory.changes
        reading, self._reading = self._reading, None
        try:
            if reading is None:
                self.memory.wake(None)
            else:
                loaded = reading.reader.result()
                source, version = loaded.source, loaded.version
                self.memory.wake(loaded.beside)
        except FAILURES as error:
            why = reason(error)
        why = first_reason(why, self._group, self._device)
        if why:
            self.memory.sleep(keeps_weights=self.memory.has_weights and source is None)
            self.memory.changes = changes
            if source is not None and source is not self._source:
                source.close()
            raise StateError(why)
        if source is not None:
            self._keep(source)
        return version

    def _keep(self, source: LockedWeights) -> None:
        """Keep the source locked: a rank that sleeps without weights reads it again."""
        if self._lock is not None:
            self._lock.close()
        if isinstance(self._source, LockedWeights) and self._source is not source:
            self._source.close()
        self._source = source


def open_weights_source(source: Path | Tensors | LockedWeights) -> LockedWeights:
    """Lock a path's weights or tensors in memory; a locked source is returned as it is."""
    if isinstance(source, LockedWeights):
        return source
    return open_source(source) if isinstance(source, Path) else LockedWeights(weights_in_memory(source))


def reason(error: Exception) -> str:
    """The message for weights that cannot be served."""
    return str(error) if isinstance(error, SuperstepError) else f"the weights cannot be read: {error!r}."
