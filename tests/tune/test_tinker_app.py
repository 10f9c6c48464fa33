"""What the server of Tinker's verbs lets in, in the form that its client reads; no model is behind it."""

import json
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from superstep.http.guard import Entrance
from superstep.tune.tinker import app as apps
from superstep.tune.tinker.app import PROTOBUF, ROOT, make_app
from superstep.tune.tinker.futures import RequestQueue, Result

SESSION = {"sdk_version": "0.38"}


@pytest.fixture
def setting():
    entrance = Entrance()
    desk = RequestQueue(SimpleNamespace(is_idle=True))
    service = SimpleNamespace(create_session=lambda: "s-1", desk=desk)
    yield SimpleNamespace(
        client=TestClient(make_app(service, entrance=entrance), "http://localhost"), entrance=entrance, desk=desk
    )
    desk.close()


def test_a_sound_request_is_answered(setting):
    answer = setting.client.post(f"{ROOT}/create_session", json=SESSION)
    assert (answer.status_code, answer.json()["session_id"]) == (200, "s-1")
    assert setting.client.post(f"{ROOT}/client/config").status_code == 200


def test_pages_of_others_are_refused(setting):
    """By the name that they have, and by what a browser sends without asking."""
    answer = setting.client.post(f"{ROOT}/create_session", json=SESSION, headers={"host": "evil.example"})
    assert answer.status_code == 421
    assert "--allowed-hosts" in answer.json()["detail"]
    for path in ("create_session", "client/config", "telemetry", "forward_backward"):
        for kind in ({}, {"content-type": "text/plain"}):
            answer = setting.client.post(f"{ROOT}/{path}", content=json.dumps(SESSION), headers=kind)
            assert answer.status_code == 415
            assert f"send application/json or {PROTOBUF}" in answer.json()["detail"]


def test_a_body_is_bounded(setting):
    answer = setting.client.post(
        f"{ROOT}/create_session", content=b"", headers={"content-length": str(65 << 20), "content-type": apps.JSON}
    )
    assert answer.status_code == 413


def test_while_it_drains_results_are_fetched_and_nothing_new_is_taken(setting):
    setting.desk.submit("r-1", lambda reply: reply(Result(b"{}")))
    setting.entrance.drain.begin(600)
    answer = setting.client.post(f"{ROOT}/create_session", json=SESSION)
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["detail"]
    assert int(answer.headers["retry-after"]) >= 1
    assert setting.client.post(f"{ROOT}/retrieve_future", json={"request_id": "r-1"}).status_code == 200
    health = setting.client.get(f"{ROOT}/healthz")
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
