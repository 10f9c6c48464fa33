"""An application on a free port, in a thread, for clients that speak HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.applications import Starlette

from superstep.http.connection import ConnectionLimits
from superstep.http.server import LOOPBACK, HttpServer, listen, make_server


@dataclass(frozen=True)
class Served:
    """Where it is, and the event loop that it runs on."""

    port: int
    loop: asyncio.AbstractEventLoop
    server: HttpServer

    @property
    def url(self) -> str:
        """Of its root."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self.server.server_state.connections)


@contextmanager
def served(app: Starlette, limits: ConnectionLimits | None = None) -> Iterator[Served]:
    """Runs until the block ends."""
    listening = listen(LOOPBACK, 0)
    server = make_server(app, limits)
    loops: list[asyncio.AbstractEventLoop] = []
    running = threading.Event()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        running.set()
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert running.wait(30)
        yield Served(listening.getsockname()[1], loops[0], server)
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive()
