"""A server that was told to end, and what it lets in before that: the grace, hosts, types, heads, connections."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from served import served
from superstep.http.connection import ConnectionLimits
from superstep.http.guard import HEAD_BYTES, Entrance
from superstep.http.server import make_server
from superstep.observe.http_access import HostNames
from superstep.serve.app import make_app
from superstep.serve.scheduling.request import ModelInfo

TOKENIZER = small_tokenizer()
HELLO = [{"role": "user", "content": "hello"}]
PLAIN, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"
BODY = {
    PLAIN: {"model": "small", "prompt": "the"},
    CHAT: {"model": "small", "messages": HELLO},
    NATIVE: {"prompt": [1, 2]},
}


class Setting:
    """A server whose engine answers one piece at a time, when it is let."""

    def __init__(self, hosts=None):
        info = ModelInfo(name="small", vocab=TOKENIZER.vocab, context_tokens=64, version="v1", end_of_text=())
        self.backend = Scripted(info, lambda request: [65] * 8)
        self.entrance = Entrance(hosts=hosts or HostNames())
        self.app = make_app(self.backend, PlainWords(TOKENIZER), entrance=self.entrance)

    @contextmanager
    def running(self, limits=None):
        with served(self.app, limits) as self.server:
            yield self

    def call(self, function):
        """On the server's event loop."""
        done = asyncio.run_coroutine_threadsafe(_called(function), self.server.loop)
        return done.result(60)

    def finish(self):
        return asyncio.run_coroutine_threadsafe(self.entrance.drain.finish(), self.server.loop)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)

    def post(self, path, **more):
        """A connection on which a request was sent."""
        body = json.dumps(BODY[path] | more).encode()
        connection = self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection


async def _called(function):
    return function()


def wait_until(is_so, seconds=60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def read(connection):
    """All that comes, up to the end."""
    told = b""
    with suppress(ConnectionResetError), connection:
        while part := connection.recv(65536):
            told += part
    return told.decode()


def status_of(told):
    return int(told.split(" ", 2)[1]) if told else None


def test_the_grace_is_for_who_was_there():
    """All forms of answers: those that are done in time are whole, the others end with an error, and new ones are
    refused; who watches is told.
    """
    setting = Setting()
    with setting.running():
        gate = setting.backend.gate = asyncio.Event()
        asked = [setting.post(path, stream=stream) for path in BODY for stream in (False, True)]
        wait_until(lambda: setting.backend.live == 6)
        for _ in range(2):  # one piece for each
            setting.call(lambda: (gate.set(), gate.clear()))
        assert httpx.get(f"{setting.server.url}/health").json()["status"] == "ready"
        setting.call(lambda: setting.entrance.drain.begin(600))
        done = setting.finish()
        health = httpx.get(f"{setting.server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert 'superstep:ready{model_name="small"} 0.0' in httpx.get(f"{setting.server.url}/metrics").text
        refused = httpx.post(f"{setting.server.url}{CHAT}", json=BODY[CHAT])
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (503, "server_error", "draining")
        assert 1 <= int(refused.headers["retry-after"]) <= 600
        assert refused.headers["connection"] == "close"
        assert not done.done()
        setting.call(setting.entrance.drain.hurry)
        assert done.result(60) == 6
        for number, connection in enumerate(asked):
            head, _, body = read(connection).partition("\r\n\r\n")
            if number % 2 == 0:
                assert head.startswith("HTTP/1.1 503")
                assert json.loads(body)["error"]["code"] == "draining"
            else:
                assert head.startswith("HTTP/1.1 200")
                last = [line for line in body.split("\r\n") if "{" in line][-1]
                assert json.loads(last.strip().removeprefix("data: "))["error"]["code"] == "draining"
                assert body.endswith("0\r\n\r\n")
        assert setting.backend.live == 0


def test_the_grace_ends_when_all_are_answered_or_it_is_over():
    setting = Setting()
    with setting.running():
        gate = setting.backend.gate = asyncio.Event()
        connection = setting.post(NATIVE)
        wait_until(lambda: setting.backend.live == 1)
        setting.call(lambda: setting.entrance.drain.begin(600))
        done = setting.finish()
        setting.call(gate.set)
        assert done.result(60) == 0
        assert status_of(read(connection)) == 200
    setting = Setting()
    with setting.running():
        setting.backend.gate = asyncio.Event()
        connection = setting.post(NATIVE)
        wait_until(lambda: setting.backend.live == 1)
        setting.call(lambda: setting.entrance.drain.begin(0.05))
        assert setting.finish().result(60) == 1
        assert status_of(read(connection)) == 503


@pytest.mark.parametrize(
    ("host", "hosts", "status"),
    [
        ("localhost", HostNames(), 200),
        ("LOCALHOST:8000", HostNames(), 200),
        ("127.0.0.1:1", HostNames(), 200),
        ("127.8.9.1", HostNames(), 200),
        ("[::1]:8000", HostNames(address="127.0.0.1"), 200),
        ("evil.example", HostNames(), 421),
        ("localhost.evil.example", HostNames(), 421),
        ("evil.example@localhost", HostNames(), 421),
        ("127.0.0.1.evil.example", HostNames(), 421),
        ("10.0.0.1", HostNames(), 421),
        ("", HostNames(), 421),
        ("model.lan", HostNames(names=("Model.lan",)), 200),
        ("other.lan", HostNames(names=("model.lan",)), 421),
        ("anything.example", HostNames(address="0.0.0.0"), 200),
        ("10.0.0.1", HostNames(address="10.0.0.1", names=("model.lan",)), 200),
        ("other.lan", HostNames(address="10.0.0.1", names=("model.lan",)), 421),
        ("box.lan", HostNames(address="Box.lan", names=("model.lan",)), 200),
    ],
)
def test_a_name_of_somebody_else_is_refused(host, hosts, status):
    """As a page has it whose name was made to lead here."""
    setting = Setting(hosts)

    async def ask():
        transport = httpx.ASGITransport(setting.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(NATIVE, json=BODY[NATIVE], headers={"host": host})

    answer = asyncio.run(ask())
    assert answer.status_code == status
    assert len(setting.backend.asked) == (status == 200)
    if status == 421:
        assert answer.json()["error"]["code"] == "unknown_host"
        assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_every_path_that_takes_a_body_takes_json_alone():
    setting = Setting()
    with setting.running():
        for path in (*BODY, "/tokenize", "/nowhere"):
            for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
                answer = httpx.post(f"{setting.server.url}{path}", content=b"{}", headers=headers)
                assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")
        chunked = httpx.post(f"{setting.server.url}{NATIVE}", content=iter([b"{", b"}"]))
        assert chunked.status_code == 415
        with_charset = {"content-type": "Application/JSON; charset=utf-8"}
        answer = httpx.post(f"{setting.server.url}{NATIVE}", content=json.dumps(BODY[NATIVE]), headers=with_charset)
        assert answer.status_code == 200
        assert len(setting.backend.asked) == 1


LIMITS = ConnectionLimits(count=4, head_s=0.3, unread_s=0.3)


def test_a_head_that_is_not_whole_in_time_ends_its_connection():
    """Silent ones, slow ones that keep coming, second ones on a connection, and what follows an answer for ever."""
    setting = Setting()
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with setting.running(LIMITS):
        with setting.connect() as silent:
            assert silent.recv(100) == b""
        for first in (b"GET /health HTTP/1.1\r\nX: ", b"\r\n", b"GET /"):
            with setting.connect() as slow:
                slow.sendall(first)
                told = b""
                slow.settimeout(0.05)
                end = time.monotonic() + 60
                while not told.endswith(b"}"):
                    with suppress(TimeoutError, ConnectionError):
                        slow.sendall(b"\r\n" if first == b"\r\n" else b"x")
                        told += slow.recv(65536)
                    assert time.monotonic() < end
                assert status_of(told.decode()) == 408
        with setting.connect() as second:
            second.sendall(whole)
            assert b" 200 " in second.recv(65536)
            second.sendall(whole[:-2])
            assert status_of(read(second)) == 408
        with setting.connect() as rest:
            rest.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
            answer = rest.recv(65536)
            end = time.monotonic() + 60
            with suppress(ConnectionError):
                while time.monotonic() < end:
                    rest.sendall(b"x")
                    time.sleep(0.02)
            assert time.monotonic() < end
            assert answer


def test_a_head_that_is_too_large_is_refused():
    setting = Setting()
    with setting.running(ConnectionLimits(count=4, head_s=60)):
        for end in (b"", b"\r\n\r\n"):  # whole or not
            with setting.connect() as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * HEAD_BYTES + end)
                told = read(connection)
            assert status_of(told) == 431
            assert json.loads(told.partition("\r\n\r\n")[2])["error"]["code"] == "head_too_large"
        with setting.connect() as connection:
            connection.sendall(b"GET /" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(read(connection)) == 431


def test_what_is_no_http_is_refused_in_the_same_form():
    setting = Setting()
    with setting.running(), setting.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00 hello\r\n\r\n")
        told = read(connection)
    assert status_of(told) == 400
    assert json.loads(told.partition("\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_connections_that_ask_nothing_make_room_and_busy_ones_do_not():
    setting = Setting()
    with setting.running(ConnectionLimits(count=4, head_s=60)):
        idle = [setting.connect() for _ in range(10)]
        assert httpx.get(f"{setting.server.url}/health").status_code == 200
        assert idle[0].recv(100) == b""  # the first of them gave way
        gate = setting.backend.gate = asyncio.Event()
        busy = [setting.post(NATIVE) for _ in range(4)]
        wait_until(lambda: setting.backend.live == 4)
        told = read(setting.connect())
        assert status_of(told) == 503
        assert json.loads(told.partition("\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        assert "retry-after: 1" in told.lower()
        setting.call(gate.set)
        assert [status_of(read(one)) for one in busy] == [200] * 4
        for one in idle:
            one.close()


def test_a_client_that_never_reads_is_let_go():
    async def large(request):
        return PlainTextResponse("x" * (64 << 20))

    with (
        served(Starlette(routes=[Route("/", large)]), LIMITS) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: server.connections)
        wait_until(lambda: not server.connections)


def test_half_of_the_open_files_are_left_to_others(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (100, 200))
    config = make_server(Starlette()).config
    config.load()
    assert config.http_protocol_class.limits.count == 50
