"""The door: where a launcher is asked by those of other hosts. Who knows the secret and says hello is let in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from superstep.errors import UserError
from superstep.runtime.hosts.messages import Address, Hello
from superstep.runtime.hosts.wire import GREETING_S, Stranger, Wire, answer, ask

WAITING = 64
"""How many may be at the door at once; more are turned away unheard."""


MEANINGLESS = (KeyError, TypeError, ValueError)
"""What is raised over a message that says something else than it should."""


class Refused(UserError):
    """A launcher does not let this one in."""


class Door:
    """Listens from here on, until it is closed.

    Args:
        at: the address and port; port 0 takes a free one.
        secret: of the run.
        enters: given a wire and who came, on a thread of its own; says why he is refused, before it returns.
        tell: told in a line of those who do not know the secret.

    Raises:
        OSError: the address is none of this host's, or the port is taken.
    """

    def __init__(
        self, at: Address, secret: bytes, enters: Callable[[Wire, Hello], None], tell: Callable[[str], None]
    ) -> None:
        self._secret, self._enters, self._tell = secret, enters, tell
        self._room = threading.Semaphore(WAITING)
        self._socket = socket.create_server(at, backlog=WAITING)
        self.address: Address = self._socket.getsockname()[:2]
        self._open: set[Wire] = set()
        threading.Thread(target=self._listen, name="superstep-door", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more, and end what came through it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for wire in list(self._open):
            wire.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, (there, *_) = self._socket.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._meet, args=(sock, there), name="superstep-guest", daemon=True).start()

    def _meet(self, sock: socket.socket, there: str) -> None:
        try:
            try:
                wire = answer(sock, self._secret)
                wire.limit(GREETING_S)
                hello = Hello(**wire.hear())
                wire.limit(None)
            finally:
                self._room.release()
        except Stranger:
            self._tell(f"{there} does not know the secret of this run, and was turned away.")
        except (OSError, TypeError):  # a scan of ports, say
            sock.close()
        else:
            self._open.add(wire)
            with suppress(OSError, *MEANINGLESS):
                self._enters(wire, hello)
            wire.close()
            self._open.discard(wire)


def knock(at: Address, secret: bytes, hello: Hello) -> Wire:
    """Ask at a door, and be let in.

    Raises:
        Refused: for a reason that trying again does not mend.
        OSError: nobody is there; or not now.
    """
    wire = ask(at, secret)
    try:
        wire.limit(GREETING_S)
        wire.say(asdict(hello))
        heard = wire.hear()
        if heard.get("say") == "refused":
            raise Refused(str(heard.get("why")))
        if heard.get("say") != "welcome":
            raise ConnectionRefusedError(str(heard.get("why")))
        wire.limit(None)
    except BaseException:
        wire.close()
        raise
    return wire
