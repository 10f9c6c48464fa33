"""A member: the launcher of any host but the first. It asks the lead for a place again and again while it has patience.

    connects ──► Met ── receives orders, sends heartbeats ──► Adrift ── connects ──► ...

Between connections it keeps its states in memory. Its ranks are ended when the lead is gone, as only the lead can end
all ranks.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe

from superstep.launch.hosts.coordinator import HostCopies
from superstep.launch.hosts.events import Cause, HostEvent, RunOver
from superstep.launch.hosts.listener import JoinRefused, knock
from superstep.launch.hosts.messages import (
    BEAT_S,
    FROM_LEAD,
    Address,
    Hello,
    LeadBeat,
    LeadLost,
    LeadReached,
    MemberBeat,
    Silence,
)
from superstep.launch.hosts.secure_channel import OtherProtocol, SecureChannel, WrongSecret


class Member:
    """Asks for a place until it is closed; the lead's orders arrive at ``orders``.

    Args:
        mine: this host's hello.
        patience_s: how long it tries where nobody answers.
        is_complete: whether the run has finished; checked where nobody listens.
    """

    def __init__(
        self,
        lead: Address,
        secret: bytes,
        *,
        mine: Hello,
        patience_s: float,
        copies: HostCopies,
        is_complete: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lead, self._secret, self._mine = lead, secret, mine
        self._patience_s, self._copies, self._is_complete = patience_s, copies, is_complete
        self._wire: SecureChannel | None = None
        self._is_closed = threading.Event()
        self.orders, self._orders = Pipe(duplex=False)
        threading.Thread(target=self._run, name="superstep-member", daemon=True).start()

    def handle_event(self, event: HostEvent) -> None:
        """Send an event to the lead; one that is gone receives it when it returns."""
        wire = self._wire
        if wire is not None:
            with suppress(OSError):
                wire.say(event)

    def close(self) -> None:
        self._is_closed.set()
        if self._wire is not None:
            self._wire.close()

    def _run(self) -> None:
        since_s = time.monotonic()
        while not self._is_closed.is_set():
            try:
                wire = knock(self._lead, self._secret, self._mine)
            except JoinRefused as refused:
                return self._end(str(refused), is_mistake=True)
            except WrongSecret:
                why = "has another secret than this host; give all hosts the same --secret-file or SUPERSTEP_SECRET."
                return self._end(f"host 0 at {self._where} {why}", is_mistake=True)
            except OtherProtocol:
                why = "is no superstep that leads a run, or of another version; see --meet."
                return self._end(f"what listens at {self._where} {why}", is_mistake=True)
            except OSError as error:
                # Where its host answers and nobody listens: a link that is down says nothing of the run.
                if error.errno == errno.ECONNREFUSED and self._is_complete():
                    return self._orders.send(RunOver())
                if time.monotonic() - since_s >= self._patience_s:
                    patience = f"{self._patience_s:g} s"
                    return self._end(f"host 0 at {self._where} has not answered within {patience} ({error})")
                self._is_closed.wait(BEAT_S)
                continue
            if self._is_over(wire):
                return None
            since_s = time.monotonic()
        return None

    @property
    def _where(self) -> str:
        return f"{self._lead[0]}:{self._lead[1]}"

    def _end(self, why: str, *, is_mistake: bool = False) -> None:
        self._orders.send(RunOver(Cause(why, is_mistake=is_mistake)))

    def _is_over(self, wire: SecureChannel) -> bool:
        """Receive orders until the last; False where the lead is gone before that."""
        silence = Silence(time.monotonic())
        self._wire = wire
        self._orders.send(LeadReached())
        threading.Thread(target=self._beat, args=(wire, silence), name="superstep-beat", daemon=True).start()
        try:
            while True:
                order = wire.hear(FROM_LEAD)
                silence.note_message()
                if isinstance(order, LeadBeat):
                    if order.steps is not None:
                        self._copies.steer(order.steps)
                    continue
                self._orders.send(order)
                if isinstance(order, RunOver):
                    return True
        except OSError as error:
            is_silent = silence.seconds > 4 * BEAT_S
            why = f"it has said nothing for {silence.seconds:.1f} s" if is_silent else str(error)
            self._wire = None
            self._orders.send(LeadLost(f"host 0 at {self._where} is lost, {why}"))
            return False
        finally:
            wire.close()

    def _beat(self, wire: SecureChannel, silence: Silence) -> None:
        while self._wire is wire:
            if silence.look(time.monotonic()):
                wire.close()
                return
            try:
                wire.say(MemberBeat(self._copies.progress()))
            except OSError:
                return
            time.sleep(BEAT_S)
