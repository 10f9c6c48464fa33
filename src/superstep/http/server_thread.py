"""ServerThread: a server that answers beside the program that started it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import uvloop
from starlette.applications import Starlette

from superstep.http.port import Port
from superstep.http.server import run_server


class ServerThread:
    """An application on a port, served by a thread.

    Args:
        app: has the port's entrance.
        port: that it is served on.
        check: called every second; what it raises ends the server.
    """

    def __init__(self, app: Starlette, port: Port, check: Callable[[], None]) -> None:
        self._app, self._port, self._check = app, port, check
        self._loop = uvloop.new_event_loop()
        self._end: Future[None] = Future()
        # A program that ends without ``stop`` is not kept by it.
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server has ended. Raises what ``check`` raised."""
        self._end.result()

    def stop(self) -> None:
        """Refuse new requests, wait for those under way as long as the port's grace, and end the server. An exception
        meanwhile, such as Ctrl-C, ends the grace."""
        try:
            self._call(lambda: self._port.entrance.drain.begin(self._port.grace_s))
            self._thread.join()
        finally:
            self._call(self._port.entrance.drain.hurry)
            self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # its loop is closed: it has ended
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(run_server(self._app, self._port.listening, self._port.entrance.drain, check=self._check))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._end.set_exception(error)
        else:
            self._end.set_result(None)


@contextmanager
def serving(app: Starlette, port: Port, *, check: Callable[[], None] = lambda: None) -> Iterator[ServerThread]:
    """Serve in a thread within the block; see ``ServerThread``."""
    thread = ServerThread(app, port, check)
    try:
        yield thread
    finally:
        thread.stop()
