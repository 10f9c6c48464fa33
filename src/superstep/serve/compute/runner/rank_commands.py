"""What the ranks that share a model do together beside computing steps: each does its part, or none has done it.

    rank 0   Read ......... steps ......... Switch        a thread of each rank reads beside the steps
    rank 1   Read ......... steps ......... Switch        all say whether they could; then all switch, or none

    rank 0   Sleep ... Read ......... Wake                the same where memory was given back: then nothing is computed

Orders come between steps, to all ranks in one row, and so every rank does them before the same step.
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
"""What weights that cannot be read, or have no room, are met with."""

Tensors = Mapping[str, Tensor]


class ReadWeights(msgspec.Struct, frozen=True, tag=True):
    """Begin to read weights, None for those that were in place."""

    path: str | None


class AreWeightsRead(msgspec.Struct, frozen=True, tag=True):
    """Say whether all is read: nobody waits for a rank whose disk is slow."""


class SwitchWeights(msgspec.Struct, frozen=True, tag=True):
    """Put what was read into place, if every rank could read it."""


class ForgetWeights(msgspec.Struct, frozen=True, tag=True):
    """Let go of what was read."""


class SleepRanks(msgspec.Struct, frozen=True, tag=True):
    """Give memory back."""

    keeps_weights: bool


class WakeRanks(msgspec.Struct, frozen=True, tag=True):
    """Take it again, with the weights that were read, if every rank could read them."""


Order = ReadWeights | AreWeightsRead | SwitchWeights | ForgetWeights | SleepRanks | WakeRanks
ORDERS: Codec[Order] = Codec(Order)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that were read.

    Attributes:
        source: where they came from, which is held.
        version: what they are called; empty where nobody wanted to know.
        beside: this rank's part.
    """

    source: LockedWeights
    version: str
    beside: PendingWeights


class WeightReading:
    """Weights that are read beside those in place, by a thread that can be given up.

    Args:
        memory: of this rank.
        device: where that is.
        source: what to read.
        is_named: whether to find out what the weights are called.
        timeout_s: how long nothing may come.
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
            if weights is not source:  # else somebody else holds it
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
        """Whether all is read, or cannot be."""
        return self.reader.is_over

    @property
    def why(self) -> str:
        """Why the weights cannot be served; empty where they can. Waits for the end."""
        try:
            self.reader.result()
        except FAILURES as error:
            return reason(error)
        return ""

    @property
    def version(self) -> str:
        """What the weights are called; empty where they cannot be served. Waits for the end."""
        return "" if self.why else self.reader.result().version

    def close(self) -> None:
        """Let go of everything."""
        if not self.why:
            self.reader.result().source.close()


class CommandChannel:
    """One rank's part.

    Args:
        memory: of this rank.
        source: where the weights in place came from at first.
        group: the ranks that share the model; None where there is one.
        device: where they compute.
        read_timeout_s: how long a reading may get nothing before it is given up.
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
        """Whether it is rank 0's."""
        return self._group is None or self._group.rank() == 0

    @property
    def reading(self) -> WeightReading | None:
        """What is being read, or was and is not yet in place."""
        return self._reading

    def obey(self, order: Order) -> None:
        """Do what rank 0 says. What all could not do is rank 0's to tell."""
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

    def read(self, source: Path | Tensors | None, *, is_named: bool = True) -> None:
        """Begin to read.

        Args:
            source: of the weights, or themselves; None means those that were in place.
            is_named: whether rank 0 is to find out what they are called.
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
        """Whether every rank's reading is over."""
        assert self._reading is not None, "something is read"
        return all_true(self._reading.is_over, self._group, self._device)

    def switch(self) -> None:
        """Put what was read into place.

        Raises:
            StateError: some rank could not read it; all are as they were.
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
        """Let go of what was read."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def wake(self) -> str:
        """Take memory again, with what was read; what that is called, empty where nothing was read or named.

        Raises:
            StateError: the weights cannot be served; all ranks sleep on.
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
        """Hold on to where the weights came from: who sleeps without them needs it once more."""
        if self._lock is not None:
            self._lock.close()
        if isinstance(self._source, LockedWeights) and self._source is not source:
            self._source.close()
        self._source = source


def open_weights_source(source: Path | Tensors | LockedWeights) -> LockedWeights:
    """A path's weights, tensors of this process, or what is open already."""
    if isinstance(source, LockedWeights):
        return source
    return open_source(source) if isinstance(source, Path) else LockedWeights(weights_in_memory(source))


def reason(error: Exception) -> str:
    """What is told of weights that cannot be served."""
    return str(error) if isinstance(error, SuperstepError) else f"the weights cannot be read: {error!r}."
