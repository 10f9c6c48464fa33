"""The line between samplers and the trainer's rank 0, where they are processes of their own on one host.

    sampler 0, each rank ──Here──▶                 whose line it is
                         ──Drawn, Retired──▶       what is drawn, in order; the first rank's
                         ◀──Version, Leave──       what may be taken, and that no more is wanted
                         ──Bye──▶                  the lane has come to its end

A line that breaks without a ``SamplerEnd`` is a fault: the other end has failed before, and says why to the launcher.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection
from pathlib import Path

import msgspec

from superstep.errors import Fault
from superstep.tune.rl.disaggregated.hub_messages import (
    EndSampling,
    FromSampler,
    Retired,
    SampledGroup,
    SamplerEnd,
    SamplerHello,
    Version,
    decode_from_trainer,
    encode,
)
from superstep.tune.rl.from_rank0 import WaitLimit

AGAIN_S = 0.05
"""How soon a line is tried again that nobody listens to yet."""

LOST = (EOFError, ConnectionError)
"""What a line is broken with."""


class HubConnection:
    """The end of a sampler's rank; the thread that samples uses it.

    Args:
        address: of the socket that the trainer's rank 0 listens to.
        here: whose line it is.
        timeout_s: how long the trainer may be waited for.

    Raises:
        Fault: nobody listens.
    """

    def __init__(self, address: Path, here: SamplerHello, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._versions: dict[int, Path] = {}
        self._is_over = False
        self._pipe = _connect(address, WaitLimit(timeout_s))
        self._say(here)

    @property
    def is_over(self) -> bool:
        """Whether no more is wanted."""
        self._listen(0.0)
        return self._is_over

    def version(self, version: int) -> Path | None:
        """The snapshot of a version, once it is there; None where no more is wanted.

        Raises:
            Fault: the trainer is late, or has gone.
        """
        patience = WaitLimit(self._timeout_s)
        self._listen(0.0)
        while version not in self._versions and not self._is_over:
            if not patience.left_s:
                raise Fault(f"the trainer has not published version {version} after {self._timeout_s:g} s.")
            self._listen(patience.left_s)
        return None if self._is_over else self._versions[version]

    def ends_within(self, seconds: float | None = None) -> bool:
        """Whether no more is wanted, once that is said or after so many seconds; None waits as long as for a version.

        Raises:
            Fault: the trainer has gone.
        """
        patience = WaitLimit(self._timeout_s if seconds is None else seconds)
        while not self.is_over and patience.left_s:
            self._listen(patience.left_s)
        return self._is_over

    def tell(self, message: SampledGroup | Retired) -> None:
        """What was drawn, or that no more will be."""
        self._say(message)

    def close(self) -> None:
        """The lane has come to its end."""
        self._say(SamplerEnd())
        self._pipe.close()

    def _listen(self, seconds: float) -> None:
        """Take what is there, or what comes within so many seconds."""
        try:
            while self._pipe.poll(seconds):
                match decode_from_trainer(self._pipe.recv_bytes()):
                    case Version(version, path):
                        self._versions[version] = Path(path)
                    case EndSampling():
                        self._is_over = True
                seconds = 0.0
        except LOST as error:
            raise _gone_fault() from error
        except msgspec.DecodeError as error:
            raise Fault(f"what came from the trainer is no message of its ({error}).") from error

    def _say(self, message: FromSampler) -> None:
        try:
            self._pipe.send_bytes(encode(message))
        except LOST as error:
            raise _gone_fault() from error


def _gone_fault() -> Fault:
    return Fault("the trainer has gone.")


def _connect(address: Path, patience: WaitLimit) -> Connection:
    while True:
        try:
            return Client(str(address), "AF_UNIX")
        except OSError as error:
            if not patience.left_s:
                raise Fault(f"the trainer does not listen after {patience.seconds:g} s ({error}).") from error
        time.sleep(AGAIN_S)
