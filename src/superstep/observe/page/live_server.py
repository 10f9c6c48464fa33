"""Serves a page that updates while its run goes on: on loopback, to clients with its token.

    GET /           the page
    GET /events     server-sent events: the page's data, whenever there is more
    GET /metrics    numbers for Prometheus

The token is part of the address, ?token=...; programs may send "Authorization: Bearer ..." instead. The Host header
must name loopback. Each request has its own thread and reads files, so the run never waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import parse_qs, urlsplit

from superstep.errors import ConfigError
from superstep.observe.http_access import LOCALHOST, HostNames, bearer_key, is_same_key
from superstep.observe.prometheus import TYPE

LOOPBACK = "127.0.0.1"
LOOK_S = 1.0
"""Seconds between looks for new data."""
SHARE = 0.02
"""The largest share of a processor for updates: slow ones are made rarely."""
QUIET_S = 15.0
"""Seconds of silence after which a listener receives a sign of life."""
MOST_LISTENERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPage:
    """What is served.

    Attributes:
        stamp: changes when there is more to show; cheap.
        update: makes the page's data, on one line.
    """

    page: Callable[[], str]
    stamp: Callable[[], object]
    update: Callable[[], str]
    metrics: Callable[[], str]


class LiveServer:
    """The server: listens at once, answers after ``begin``, in threads of its own.

    Args:
        port: 0 takes any free one.
        clock: seconds.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, port: int, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._listeners = threading.BoundedSemaphore(MOST_LISTENERS)
        self._newest: tuple[object, str] = (None, "")
        self._next_s = 0.0
        try:
            self._server = _Server((LOOPBACK, port), self)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--web-port = {port} cannot be listened on at {LOOPBACK} ({error}); choose another, or 0 for any free "
                "one."
            ) from None
        self.shown: ServedPage | None = None

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?token={self._token}"

    def begin(self, shown: ServedPage) -> None:
        """Begin to answer."""
        self.shown = shown
        threading.Thread(target=self._server.serve_forever, name="superstep-web", daemon=True).start()

    def close(self) -> None:
        """Close the port, and end all listeners."""
        self._is_over.set()
        if self.shown is not None:
            self._server.shutdown()
        self._server.server_close()

    def is_allowed(self, given: str) -> bool:
        return is_same_key(given, self._token)

    def listen(self, write: Callable[[str], None]) -> bool:
        """Serve a listener until it leaves or the server ends; False where there are too many."""
        if not self._listeners.acquire(blocking=False):
            return False
        try:
            shown: object = None
            sent_s = self._clock()
            while not self._is_over.is_set():
                stamp, update = self._update()
                if stamp != shown:
                    write(f"data: {update}\n\n")
                    shown, sent_s = stamp, self._clock()
                elif self._clock() - sent_s >= QUIET_S:
                    write(": quiet\n\n")
                    sent_s = self._clock()
                self._is_over.wait(LOOK_S)
            write("event: over\ndata: \n\n")
        finally:
            self._listeners.release()
        return True

    def _update(self) -> tuple[object, str]:
        """The data, made once for all listeners."""
        assert self.shown is not None
        with self._lock:
            stamp = self.shown.stamp()
            if stamp != self._newest[0] and self._clock() >= self._next_s:
                begin_s = self._clock()
                self._newest = stamp, self.shown.update()
                took_s = self._clock() - begin_s
                self._next_s = begin_s + took_s / SHARE
            return self._newest


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A thread that has its client still listening is not waited for.
    block_on_close = False
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], served: LiveServer) -> None:
        self.served = served
        super().__init__(address, _Answers)

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which may take seconds."""
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a client that leaves is no error, and the terminal is the run's."""


class _Answers(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        url, served = urlsplit(self.path), self.server.served
        if not HostNames(address=LOOPBACK).accept(self.headers.get_all("Host") or []):
            return self._say(421, "text/plain", f"the Host header is not of this server; use {LOCALHOST}.\n")
        given = parse_qs(url.query).get("token") or [bearer_key(self.headers.get("Authorization", ""))]
        if not served.is_allowed(given[0]):
            return self._say(403, "text/plain", _NO_TOKEN)
        assert served.shown is not None
        try:
            match url.path:
                case "/":
                    self._say(200, "text/html; charset=utf-8", served.shown.page())
                case "/metrics":
                    self._say(200, TYPE, served.shown.metrics())
                case "/events":
                    self._listen(served)
                case _:
                    self._say(404, "text/plain", "the paths are /, /events and /metrics.\n")
        except Exception as error:  # noqa: BLE001  whatever it is, the run goes on, and who asked is told
            if not isinstance(error, ConnectionError | TimeoutError):
                self._say(503, "text/plain", f"not now: {error}\n")
        return None

    def _listen(self, served: LiveServer) -> None:
        has_begun = False

        def write(text: str) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self.send_response(200)
                for name, value in (("Content-Type", "text/event-stream"), ("Connection", "close"), *_HEADERS):
                    self.send_header(name, value)
                self.end_headers()
            self.wfile.write(text.encode())
            self.wfile.flush()

        self.close_connection = True
        try:
            if not served.listen(write):
                self._say(503, "text/plain", f"{MOST_LISTENERS} pages listen already; close one.\n")
        except Exception:
            if not has_begun:
                raise

    def _say(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *_HEADERS):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: the terminal is the run's."""


_NO_TOKEN = (
    "the address lacks the run's token: it ends the address that superstep train printed, or is that of "
    "SUPERSTEP_WEB_TOKEN where that was set.\n"
)
_HEADERS = (("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer"), ("X-Content-Type-Options", "nosniff"))
