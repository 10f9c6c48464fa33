"""The connection between samplers and the trainer's rank 0, in separate processes, on one host or on several.

    sampler 0, each rank ──SamplerHello──▶                its numbers
                         ──SampledGroup, Retired──▶       samples, in order; from the first rank
                         ◀──RemainingProgram──            what is left to do
                         ◀──Version, EndSampling──        available versions, and the end
                         ──SamplerEnd──▶                  the end of the lane

A connection that breaks without a ``SamplerEnd`` is a fault: the other end has failed, and reports the reason to the
launcher.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from superstep.errors import Fault
from superstep.launch.hosts.secure_channel import ForeignMessage, SecureChannel, ask
from superstep.launch.rendezvous import LaunchStore
from superstep.tune.program.instructions import Iterations
from superstep.tune.program.text import read_iterations
from superstep.tune.rl.disaggregated.hub_messages import (
    ADDRESS,
    FROM_TRAINER,
    EndSampling,
    FromSampler,
    RemainingProgram,
    Retired,
    SampledGroup,
    SamplerEnd,
    SamplerHello,
    Version,
)
from superstep.tune.rl.from_rank0 import WaitLimit

AGAIN_S = 0.05
"""Pause between attempts to connect."""

HUB = "superstep/hub/{attempt}"
"""The key of the hub's address in the store of a launch. The run has a hub of its own after each time it went back."""


class HubConnection:
    """The end of a sampler's rank, used by its sampling thread.

    Args:
        store: of the launch, where the hub's address is.
        here: numbers of this rank.
        timeout_s: for the trainer.
        attempt: how often the run has gone back in this launch.

    Raises:
        Fault: nobody listens, or not the hub.
    """

    def __init__(self, store: LaunchStore, here: SamplerHello, timeout_s: float, attempt: int = 0) -> None:
        self._timeout_s = timeout_s
        self._program: RemainingProgram | None = None
        self._versions: dict[int, Path] = {}
        self._end: EndSampling | None = None
        self._wire = _connect(store, HUB.format(attempt=attempt), WaitLimit(timeout_s))
        self._say(here)

    @property
    def is_over(self) -> bool:
        """Whether the trainer needs no more."""
        self._listen(0.0)
        return self._end is not None

    def program(self) -> tuple[Iterations, Mapping[int, int]]:
        """What is left to do, and the task numbers of places that have exchanged theirs.

        Raises:
            Fault: the trainer is late, or the connection broke.
        """
        patience = WaitLimit(self._timeout_s)
        while self._program is None:
            if not patience.left_s:
                raise Fault(f"the trainer has not said what is left after {self._timeout_s:g} s.")
            self._listen(patience.left_s)
        return read_iterations(self._program.text), self._program.tasks

    def version(self, version: int) -> Path | None:
        """The snapshot of a version, once it exists; None if the trainer needs no more.

        Raises:
            Fault: the trainer is late, or the connection broke.
        """
        patience = WaitLimit(self._timeout_s)
        self._listen(0.0)
        while version not in self._versions and self._end is None:
            if not patience.left_s:
                raise Fault(f"the trainer has not published version {version} after {self._timeout_s:g} s.")
            self._listen(patience.left_s)
        return None if self._end is not None else self._versions[version]

    def ends_within(self, seconds: float | None = None) -> bool:
        """Wait at most ``seconds`` for the end; None waits as long as for a version.

        Raises:
            Fault: the connection broke.
        """
        patience = WaitLimit(self._timeout_s if seconds is None else seconds)
        while not self.is_over and patience.left_s:
            self._listen(patience.left_s)
        return self.is_over

    def tell(self, message: SampledGroup | Retired) -> None:
        """Send samples, or the end of a version's samples."""
        self._say(message)

    def close(self) -> bool:
        """At the end of the lane wait until the trainer needs no more, however long it trains, and close; whether the
        run goes on with another program.

        Raises:
            Fault: the connection broke.
        """
        while self._end is None:
            self._listen(self._timeout_s)
        self._say(SamplerEnd())
        self._wire.close()
        return self._end.goes_on

    def _listen(self, seconds: float) -> None:
        """Receive pending messages, and those of the next ``seconds``."""
        try:
            while self._wire.poll(seconds):
                match self._wire.hear(FROM_TRAINER):
                    case RemainingProgram() as program:
                        self._program = program
                    case Version(version, path):
                        self._versions[version] = path
                    case EndSampling() as end:
                        self._end = end
                seconds = 0.0
        except ForeignMessage as error:
            raise Fault(f"the trainer: {error}.") from error.__cause__
        except OSError as error:
            raise _make_gone_fault() from error

    def _say(self, message: SamplerHello | FromSampler) -> None:
        try:
            self._wire.say(message)
        except OSError as error:
            raise _make_gone_fault() from error


def _make_gone_fault() -> Fault:
    return Fault("the trainer has gone.")


def _connect(store: LaunchStore, key: str, patience: WaitLimit) -> SecureChannel:
    while True:
        why: Exception | None = None
        try:
            if (data := store.get(key)) is not None:
                hub = ADDRESS.decode(data)
                return ask((hub.host, hub.port), store.secret or hub.secret or b"")
        except msgspec.DecodeError as error:
            raise Fault(f"the launch's store holds under {key} what the trainer did not write ({error}).") from error
        except OSError as error:
            why = error
        if not patience.left_s:
            detail = "" if why is None else f" ({why})"
            raise Fault(f"the trainer does not listen after {patience.seconds:g} s{detail}.") from why
        time.sleep(AGAIN_S)
