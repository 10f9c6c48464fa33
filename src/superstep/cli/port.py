"""The port that a verb answers on: taken before anything is loaded, served until the verb is told to end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socket import socket

from starlette.applications import Starlette

from superstep.cli.arguments.port import PortOptions
from superstep.http.guard import Entrance
from superstep.http.server import listen, serve
from superstep.observe.http_access import HostNames


@dataclass(frozen=True, slots=True)
class Port:
    """A port that is listened on.

    Attributes:
        options: what was asked for.
        listening: its socket.
        entrance: what stands before the application that is to be served.
    """

    options: PortOptions
    listening: socket
    entrance: Entrance

    @property
    def url(self) -> str:
        """Of its root."""
        host = self.options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.listening.getsockname()[1]}"

    def serve(self, app: Starlette) -> int:
        """Answer until told to end; the exit status. The application has this port's entrance."""
        return serve(
            app,
            self.listening,
            drain=self.entrance.drain,
            grace_s=self.options.grace_s,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )


@contextmanager
def open_port(options: PortOptions) -> Iterator[Port]:
    """Listen within the block.

    Raises:
        ConfigError: the port cannot be listened on.
    """
    with listen(options.host, options.port) as listening:
        yield Port(options, listening, Entrance(hosts=HostNames(address=options.host, names=options.allowed_hosts)))
