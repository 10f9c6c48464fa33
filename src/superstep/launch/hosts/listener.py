"""The listener of other hosts' launchers, or of ranks. Whoever proves the secret and says hello is let in.

    connects                             a place among strangers for three seconds; where all are taken, the oldest
                                         stranger is dropped
    proves that it knows the secret      a place among guests
    says hello within three more seconds is let in

So strangers, however slow and many, cannot keep out a host that knows the secret: the proof takes two round trips.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from superstep.comm.codec import Codec
from superstep.errors import UserError
from superstep.launch.hosts.messages import WELCOME, Address, Hello, NotNow, Refused
from superstep.launch.hosts.secure_channel import GREETING_S, ForeignMessage, SecureChannel, WrongSecret, answer, ask

M = TypeVar("M")

WAITING = 64
"""The most strangers at once."""

GUESTS = 1024
"""The most guests at once; a host has at most three connections to another."""

MOST_REPORTED = 16
"""The most addresses of strangers that are reported, each once."""


class JoinRefused(UserError):
    """A launcher refuses this host."""


class SecureListener(Generic[M]):
    """Listens until it is closed.

    Args:
        at: address and port; port 0 takes a free one.
        hellos: codec of the first message of a connection.
        enters: called with a channel and its hello on a thread of its own; may refuse before it returns.
        tell: called with a line about those who do not know the secret, or send what is not expected.

    Raises:
        OSError: the address is not one of this host's, or the port is taken.
    """

    def __init__(
        self,
        at: Address,
        secret: bytes,
        hellos: Codec[M],
        enters: Callable[[SecureChannel, M], None],
        tell: Callable[[str], None],
    ) -> None:
        self._secret, self._hellos, self._enters, self._tell = secret, hellos, enters, tell
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, str] = {}
        self._guests: set[SecureChannel] = set()
        self._reported: set[str] = set()
        family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
        self._socket = socket.create_server(at, family=family, backlog=WAITING)
        self.address: Address = self._socket.getsockname()[:2]
        threading.Thread(target=self._listen, name="superstep-door", daemon=True).start()

    @property
    def guests(self) -> int:
        """The number of connections that have proved the secret."""
        with self._lock:
            return len(self._guests)

    def close(self) -> None:
        """Accept no more connections, and close the accepted ones."""
        _hang_up(self._socket)
        self._socket.close()
        with self._lock:
            guests = list(self._guests)
        for wire in guests:
            wire.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, (there, *_) = self._socket.accept()
            except OSError:
                return
            with self._lock:
                if len(self._strangers) >= WAITING:
                    oldest = next(iter(self._strangers))
                    # Now, for its thread may be late: the next to come is not to hang it up again.
                    del self._strangers[oldest]
                    _hang_up(oldest)  # its thread finds the end of it, and leaves
                self._strangers[sock] = there
            threading.Thread(target=self._meet, args=(sock, there), name="superstep-guest", daemon=True).start()

    def _meet(self, sock: socket.socket, there: str) -> None:
        try:
            try:
                wire = answer(sock, self._secret)
            finally:
                with self._lock:
                    self._strangers.pop(sock, None)
            with self._inside(wire):
                self._enters(wire, wire.hear(self._hellos, within_s=GREETING_S))
        except WrongSecret:
            self._tell_of(there, "does not know the secret of this run")
        except ForeignMessage as error:
            self._tell_of(there, f"knows the secret of this run, but {error}")
        except OSError:  # a scan of ports, say
            sock.close()

    @contextmanager
    def _inside(self, wire: SecureChannel) -> Iterator[None]:
        """Hold a place for the channel within the block. Raises ConnectionRefusedError where no place is free."""
        with self._lock:
            if len(self._guests) >= GUESTS:
                raise ConnectionRefusedError("all places are taken")
            self._guests.add(wire)
        try:
            yield
        finally:
            wire.close()
            with self._lock:
                self._guests.discard(wire)

    def _tell_of(self, there: str, what: str) -> None:
        with self._lock:
            is_new = there not in self._reported and len(self._reported) < MOST_REPORTED
            if is_new:
                self._reported.add(there)
        if is_new:
            self._tell(f"{there} {what}; it was turned away.")


def _hang_up(sock: socket.socket) -> None:
    """Wake a thread that waits for the socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def knock(at: Address, secret: bytes, hello: Hello) -> SecureChannel:
    """Connect to a listener and say hello.

    Raises:
        JoinRefused: for a reason that a retry does not change.
        OSError: nobody listens, or not now.
    """
    wire = ask(at, secret)
    try:
        wire.say(hello)
        match wire.hear(WELCOME, within_s=GREETING_S):
            case Refused(why):
                raise JoinRefused(why)
            case NotNow(why):
                raise ConnectionRefusedError(why)
    except BaseException:
        wire.close()
        raise
    return wire
