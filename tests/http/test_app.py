"""What every server shares: keys, bodies, paths that are not served, and errors of handlers."""

from __future__ import annotations

import gzip

import pytest
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from superstep.errors import ConfigError
from superstep.http.app import ErrorResponses, KeyScheme, make_app, read_bearer, with_key
from superstep.http.guard import Entrance
from superstep.http.limits import BodyLimits, read_json
from superstep.http.request_error import RequestError

LIMITS = BodyLimits(body_bytes=1 << 10)
SCHEME = KeyScheme(read_bearer, lambda: RequestError("wrong key.", status=401))


async def echo(request, state):
    return JSONResponse({"state": state, "body": await read_json(request, LIMITS)})


async def fail(request, state):
    raise ConfigError("n = 0 must be above 0.")


def client_of(refused=None, key="secret"):
    def refuse(error):
        if refused is not None:
            refused.append(error.status)
        return error.response()

    app = make_app(
        [("POST", "/echo", echo), ("GET", "/fail", fail), ("POST", "/keyed", with_key(echo, key, SCHEME))],
        "shared",
        entrance=Entrance(),
        errors=ErrorResponses(refuse=refuse, convert=lambda error: RequestError(str(error), status=422)),
        limits=LIMITS,
    )
    return TestClient(app, "http://localhost")


def test_a_handler_is_given_the_state():
    assert client_of().post("/echo", json={"n": 1}).json() == {"state": "shared", "body": {"n": 1}}


def test_errors_of_handlers_and_unknown_paths_are_counted_and_answered_as_json():
    refused = []
    client = client_of(refused)
    assert client.get("/fail").json()["error"]["message"] == "n = 0 must be above 0."
    gone = client.get("/nowhere").json()["error"]["message"]
    assert gone == "'/nowhere' is not served; the paths are: POST /echo, GET /fail, POST /keyed."
    assert client.get("/echo").json()["error"]["message"] == "GET '/echo': Method Not Allowed; use POST."
    assert refused == [422, 404, 405]


@pytest.mark.parametrize("given", [None, "", "secret", "Basic secret", "Bearer", "Bearer ", "Bearer secre", "Bearer é"])
def test_a_wrong_key_is_refused(given):
    headers = {} if given is None else {"authorization": given.encode()}
    assert client_of().post("/keyed", json={}, headers=headers).status_code == 401
    assert client_of(key="").post("/keyed", json={}, headers=headers).status_code == 401


@pytest.mark.parametrize("given", ["Bearer secret", "bearer  secret "])
def test_the_right_key_is_let_in(given):
    assert client_of().post("/keyed", json={}, headers={"authorization": given}).status_code == 200


def test_a_compressed_body_is_refused():
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = client_of().post("/echo", content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert "send them as they are" in answer.json()["error"]["message"]
