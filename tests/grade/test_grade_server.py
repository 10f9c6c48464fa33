"""Grades over HTTP: one, many, wrong ones; the numbers; and the verb itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from starlette.testclient import TestClient

from boxed import command_lines, needs_bubblewrap
from superstep.grade.api.app import make_app
from superstep.grade.api.metrics import GradeMetrics
from superstep.grade.config import GradeConfig
from superstep.grade.workers.pool import Pool
from superstep.http.guard import Entrance
from superstep.http.limits import BodyLimits

TASKS = Path(__file__).with_name("trying_tasks.py")
GOOD = TASKS.parents[2] / "recipes" / "graded_tasks.py"


@pytest.fixture(scope="module")
def client():
    metrics = GradeMetrics()
    config = GradeConfig(sandbox="none", workers=2, retries=1, timeout_s=2, grader_timeout_s=3)
    with Pool(TASKS, config, retried=metrics.count_retry, is_heard=False) as pool:
        yield TestClient(make_app(pool, metrics, limits=BodyLimits(body_bytes=1 << 16), queue=40), "http://localhost")


def test_an_answer_gets_its_verdict(client):
    right = client.post("/grade", json={"index": 2, "seed": 3, "answer": "5"})
    assert (right.status_code, right.json()["verdict"], right.json()["score"]) == (200, "ok", 1.0)
    wrong = client.post("/grade", json={"index": 2, "answer": "5"}).json()
    assert (wrong["verdict"], wrong["score"]) == ("wrong", 0.0)
    turns = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "turns"}]
    told = client.post("/grade", json={"index": 0, "turns": turns, "finish": "length"}).json()
    assert told == {"verdict": "ok", "score": 0.5, "why": "assistant:a assistant:turnslength"}


def test_what_is_expected_is_not_sent(client):
    told = client.post("/grade", json={"index": 7000, "seed": 77, "answer": "1"}).text
    assert "7077" not in told


def test_a_batch_is_answered_in_order(client):
    items = [{"index": k, "answer": str(k + k % 2)} for k in range(12)]
    told = client.post("/grade/batch", json={"items": items}).json()["verdicts"]
    assert [each["score"] for each in told] == [float(k % 2 == 0) for k in range(12)]


def test_a_grader_error_has_no_score(client):
    told = client.post("/grade", json={"index": 0, "answer": "raise"}).json()
    assert (told["verdict"], told["score"]) == ("grader_error", None)
    assert "KeyError" in told["why"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/grade", {}, 400, "index is missing"),
        ("/grade", {"index": 1}, 400, "answer or turns must be given, and not both."),
        ("/grade", {"index": 1, "answer": "a", "turns": []}, 400, "and not both"),
        ("/grade", {"index": -1, "answer": "a"}, 400, "index = -1 must be from 0"),
        ("/grade", {"index": 2**63, "answer": "a"}, 400, "index = "),
        ("/grade", {"index": "1", "answer": "a"}, 400, "index = '1'"),
        ("/grade", {"index": 1, "answer": "a", "sed": 3}, 400, "did you mean 'seed'?"),
        ("/grade", {"index": 1, "turns": [{"role": "robot", "content": ""}]}, 400, "turns[0].role"),
        ("/grade", {"index": 1, "answer": "a" * 70_000}, 413, "over the limit"),
        ("/grade", {"index": 13, "answer": "a"}, 500, "task(13, 0) fails: ValueError: no such task"),
        ("/grade/batch", {"items": []}, 400, "items has 0 entries"),
        ("/grade/batch", {"items": [{"index": 1}]}, 400, "items[0].answer or items[0].turns"),
        ("/grade/batch", {"items": [{"index": 1, "answer": ""}] * 41}, 400, "the queue holds 40"),
        ("/grades", {}, 404, "POST /grade, POST /grade/batch, GET /health, GET /metrics"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(path, body, status, said, client):
    answer = client.post(path, json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_is_refused(client):
    assert client.post("/grade", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert client.post("/grade", content=b"{}").status_code == 415
    assert client.get("/grade").status_code == 405


def test_health_and_numbers(client):
    told = client.get("/health").json()
    assert told.pop("memory_bound") in ("cgroup", "watched")
    assert told == {"status": "ready", "workers": 2, "sandbox": "none"}

    def number(name):
        found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found[1])

    before = [number(name) for name in NUMBERS]
    client.post("/grade", json={"index": 2, "seed": 3, "answer": "5"})
    client.post("/grade", json={"index": 2, "seed": 3, "answer": "raise"})
    client.post("/grade", json={})
    assert [now - then for now, then in zip(map(number, NUMBERS), before, strict=True)] == [1, 1, 0, 1, 2, 1, 0]


def test_names_of_others_are_refused_and_a_server_that_drains_says_so(tmp_path):
    metrics, entrance = GradeMetrics(), Entrance()
    with Pool(TASKS, GradeConfig(sandbox="none", workers=1), is_heard=False) as pool:
        client = TestClient(make_app(pool, metrics, entrance=entrance), "http://localhost")
        answer = client.post("/grade", json={"index": 2, "answer": "4"}, headers={"host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host")
        assert client.get("/health").json()["status"] == "ready"
        entrance.drain.begin(600)
        answer = client.post("/grade", json={"index": 2, "answer": "4"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert 'superstep:grade_requests_refused_total{status="503"} 1.0' in generate_latest(metrics.registry).decode()


NUMBERS = (
    'superstep:grades_total{verdict="ok"}',
    'superstep:grades_total{verdict="grader_error"}',
    'superstep:grades_total{verdict="timeout"}',
    "superstep:grade_retries_total",
    "superstep:grade_seconds_count",
    'superstep:grade_requests_refused_total{status="400"}',
    "superstep:grades_running",
)


UNENDED = """
import os, sys
from superstep.cli.main import main
from superstep.launch import line_process as lines
lines.GONE_S = 1.0
os.kill = os.killpg = lambda process, number: None
sys.exit(main(sys.argv[1:]))
"""
"""The command line where no signal ends a process, as none ends one that hangs in the kernel."""


@contextmanager
def verb(*words, program=("-m", "superstep")):
    """The verb in a process of its own, and where it answers."""
    command = [sys.executable, *program, "grade", "serve", *words, "--port", "0"]
    # A shell's background job, as this suite may be, has its children ignore Ctrl-C.
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=default) as process:
        try:
            told = process.stdout.readline()
            yield process, told, re.search(r"http://\S+(?=/grade)", told)[0]
        finally:
            process.kill()


def asked(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@needs_bubblewrap
def test_the_verb_grades_programs_in_the_sandbox_and_leaves_nothing():
    mark = f"served-{os.getpid()}"
    right = "def rotate(items, by):\n    by %= len(items)\n    return items[by:] + items[:by]"
    leaves = f"import os\nif os.fork() == 0:\n    os.execv('/bin/sleep', ['{mark}', '600'])\n{right}"
    reads = f"import os\ndef rotate(items, by):\n    return os.listdir('{TASKS.parent}')"
    with verb(str(GOOD), "--grade.workers", "2") as (process, told, url):
        assert "2 at a time; programs run in bubblewrap, their memory is bounded by " in told
        items = [{"index": 2, "answer": source} for source in (right, leaves, reads, "")]
        verdicts = asked(f"{url}/grade/batch", {"items": items})["verdicts"]
        assert [each["verdict"] for each in verdicts] == ["ok", "ok", "wrong", "wrong"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 143)
    assert [line for line in command_lines() if mark.encode() in line] == []


def test_the_verb_says_that_there_is_no_sandbox():
    with verb(str(TASKS), "--grade.sandbox", "none") as (process, told, url):
        assert "WITHOUT A SANDBOX, as this user" in told
        assert "127.0.0.1" in url
        with pytest.raises(urllib.error.HTTPError):
            asked(f"{url}/grade", {"index": 13, "answer": ""})
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)


def test_ctrl_c_ends_a_server_whose_grader_cannot_be_ended(tmp_path):
    words = [str(TASKS), "--grade.sandbox", "none", "--grade.grader-timeout-s", "600", "--grace-s", "0"]
    answers = []

    def ask():
        try:
            asked(f"{url}/grade", {"index": 0, "answer": f"hang {tmp_path / 'hangs'}"})
        except urllib.error.HTTPError as error:
            answers.append(error.code)

    with verb(*words, program=("-c", UNENDED)) as (process, _, url):
        asks = threading.Thread(target=ask, daemon=True)
        asks.start()
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        asks.join(60)
    assert answers == [503]
