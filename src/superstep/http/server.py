"""HttpServer: an application on a port, until it is stopped."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import uvicorn
import uvloop
from starlette.applications import Starlette

from superstep.errors import ConfigError
from superstep.http.connection import ConnectionLimits, connections_within
from superstep.http.drain import Drain
from superstep.launch.stop_request import StopRequest

LOOPBACK = "127.0.0.1"
KEPT_S = 65
"""Seconds that an idle connection is kept: longer than clients keep theirs, else they would send into a connection that
is just closing.
"""

CLOSING_S = 5
"""Seconds for connections to close once all requests have been answered."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HttpServer(uvicorn.Server):
    """uvicorn's server, without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: ``serve`` handles signals."""
        yield


def make_server(app: Starlette, limits: ConnectionLimits | None = None) -> HttpServer:
    """Make a server, not yet running. ``should_exit`` stops it from any thread. ``limits``: of connections; the default
    leaves half of this process's file descriptors to others.
    """
    limits = limits or ConnectionLimits()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = replace(limits, count=min(limits.count, max(1, files // 2)))
    config = uvicorn.Config(
        app,
        http=connections_within(limits),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return HttpServer(config)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket on a port; port 0 is any free one. Clients that connect before ``serve`` wait. Raises ConfigError
    where the port is taken, or the host is not one of this machine's.
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
    listening: socket.socket,
    *,
    drain: Drain,
    grace_s: float,
    tell: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; then drain. A second signal, a second later or more, ends the grace.

    Args:
        listening: made by ``listen``; closed at the end.
        drain: the application's.
        grace_s: seconds for requests under way.
        tell: called with a line about those.
        check: called every second; what it raises ends the server, and is raised.

    Returns:
        The exit status: 0 where every request was answered, else 128 plus the signal's number.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(app, listening, _Ending(drain, grace_s, tell), check))


async def run_server(app: Starlette, listening: socket.socket, drain: Drain, check: Callable[[], None]) -> int:
    """Serve until the drain has begun, and then to its end; for the arguments see ``serve``.

    Returns:
        The number of requests that outlasted the grace.
    """
    server = make_server(app)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    begun = asyncio.ensure_future(drain.wait_begun())
    checking = asyncio.ensure_future(_call_every_second(check))
    await asyncio.wait({serving, begun, checking}, return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    if checking.done():
        drain.begin(0)
    unfinished = await drain.finish()
    server.should_exit = True
    await serving
    if checking.done():
        await checking
    checking.cancel()
    return unfinished


async def _call_every_second(check: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(1)
        check()


class _Ending:
    """The reaction to signals. ``number``: the first signal's; 0 where none came."""

    def __init__(self, drain: Drain, grace_s: float, tell: Callable[[str], None]) -> None:
        self.drain = drain
        self.number = 0
        self._grace_s, self._tell, self._stop = grace_s, tell, StopRequest()

    def hear(self, number: int) -> None:
        if self._stop.ask():
            self.drain.hurry()
        elif not self.number:
            self.number = number
            self.drain.begin(self._grace_s)
            if self.drain.under_way:
                self._tell(
                    f"shutting down: {len(self.drain.under_way)} requests under way have {self._grace_s:g} s; a second "
                    "signal ends them now."
                )


async def _serve(app: Starlette, listening: socket.socket, ending: _Ending, check: Callable[[], None]) -> int:
    with _signals(ending.hear):
        unfinished = await run_server(app, listening, ending.drain, check)
    return 128 + ending.number if unfinished else 0


@contextmanager
def _signals(hear: Callable[[int], None]) -> Iterator[None]:
    """Handle signals on the event loop within the block; ignored signals stay ignored, as nohup wants."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def came(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(hear, number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, came)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
