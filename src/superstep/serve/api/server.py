"""The server: an application on a port."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from superstep.errors import ConfigError

LOOPBACK = "127.0.0.1"
KEPT_S = 65
"""How long a connection without a request is kept: longer than clients keep theirs, who would else send into one that
is just being closed."""

LEAVING_S = 5
"""How long answers under way may go on once the server was told to stop."""


def make_server(app: Starlette) -> uvicorn.Server:
    """A server that is not yet run. ``should_exit`` stops it from any thread."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=LEAVING_S,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket on a port; port 0 is any free one.

    Raises:
        ConfigError: the port is taken, or the host is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(2048)
    except (OSError, OverflowError) as error:
        made.close()
        raise ConfigError(
            f"port = {port} cannot be listened on at host = '{host}' ({error}); choose another, or 0 for any free one."
        ) from None
    return made


def serve(
    app: Starlette,
    *,
    host: str = LOOPBACK,
    port: int = 8000,
    ready: Callable[[str, int], None] | None = None,
) -> None:
    """Serves until the process is told to stop by SIGINT or SIGTERM.

    Args:
        app: of ``make_app``.
        host: to listen on; the ordinary one is seen by this machine alone.
        port: to listen on; 0 for any free one.
        ready: told host and port once clients can connect.

    Raises:
        ConfigError: the port cannot be listened on.
    """
    listening = listen(host, port)
    try:
        if ready is not None:
            ready(host, listening.getsockname()[1])  # the socket listens: who connects now waits a moment
        make_server(app).run(sockets=[listening])
    finally:
        listening.close()
