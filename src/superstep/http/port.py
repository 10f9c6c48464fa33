"""Port: an address that a server listens on. It is opened before the server loads anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from socket import socket

from starlette.applications import Starlette

from superstep.http.guard import Entrance
from superstep.http.server import listen, serve
from superstep.observe.http_access import HostNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An open port.

    Attributes:
        host: its address.
        listening: its socket.
        entrance: the checks before the application that is served on it.
        grace_s: seconds that running requests get after a request to stop.
    """

    host: str
    listening: socket
    entrance: Entrance
    grace_s: float

    @property
    def url(self) -> str:
        """The address of its root."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.listening.getsockname()[1]}"

    def serve(
        self,
        app: Starlette,
        *,
        tell: Callable[[str], None] = lambda line: None,
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Serve an application that has this port's entrance; see ``http.server.serve``."""
        return serve(app, self.listening, drain=self.entrance.drain, grace_s=self.grace_s, tell=tell, check=check)


@contextmanager
def open_port(host: str, port: int, *, names: Sequence[str], grace_s: float) -> Iterator[Port]:
    """Listen within the block; clients that connect before the server runs wait.

    Args:
        host: the address to listen on.
        port: 0 means any free port.
        names: names that a request's Host header may have, in addition to those of loopback.
        grace_s: seconds that running requests get after a request to stop.

    Raises:
        ConfigError: the server cannot listen on the port.
    """
    with listen(host, port) as listening:
        entrance = Entrance(hosts=HostNames(address=host, names=names))
        yield Port(host=host, listening=listening, entrance=entrance, grace_s=grace_s)
