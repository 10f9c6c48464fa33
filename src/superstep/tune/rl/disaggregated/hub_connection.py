"""The connection between samplers and the trainer's rank 0, in separate processes of one host.

    sampler 0, each rank ──Here──▶                 its numbers
                         ──Drawn, Retired──▶       samples, in order; from the first rank
                         ◀──Version, Leave──       available versions, and the end
                         ──Bye──▶                  the end of the lane

A connection that breaks without a ``SamplerEnd`` is a fault: the other end has failed, and reports the reason to the
launcher.
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
"""Pause between attempts to connect."""

LOST = (EOFError, ConnectionError)
"""Errors of a broken connection."""


class HubConnection:
    """The end of a sampler's rank, used by its sampling thread.

    Args:
        address: of the socket of the trainer's rank 0.
        here: numbers of this rank.
        timeout_s: for the trainer.

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
        """Whether the trainer needs no more."""
        self._listen(0.0)
        return self._is_over

    def version(self, version: int) -> Path | None:
        """The snapshot of a version, once it exists; None if the trainer needs no more.

        Raises:
            Fault: the trainer is late, or the connection broke.
        """
        patience = WaitLimit(self._timeout_s)
        self._listen(0.0)
        while version not in self._versions and not self._is_over:
            if not patience.left_s:
                raise Fault(f"the trainer has not published version {version} after {self._timeout_s:g} s.")
            self._listen(patience.left_s)
        return None if self._is_over else self._versions[version]

    def ends_within(self, seconds: float | None = None) -> bool:
        """Wait at most ``seconds`` for the end; None waits as long as for a version.

        Raises:
            Fault: the connection broke.
        """
        patience = WaitLimit(self._timeout_s if seconds is None else seconds)
        while not self.is_over and patience.left_s:
            self._listen(patience.left_s)
        return self._is_over

    def tell(self, message: SampledGroup | Retired) -> None:
        """Send samples, or the end of a version's samples."""
        self._say(message)

    def close(self) -> None:
        """Report the end of the lane, and close."""
        self._say(SamplerEnd())
        self._pipe.close()

    def _listen(self, seconds: float) -> None:
        """Receive pending messages, and those of the next ``seconds``."""
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
