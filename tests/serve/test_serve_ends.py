"""How `superstep serve` ends, and what it refuses before it begins: real processes, signals and sockets."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

import model_folder
import ranks

pytestmark = pytest.mark.multiproc


def body(tokens, **more):
    return {"prompt": [1, 2, 3], "sampling": {"max_tokens": tokens, "ignore_eos": True}} | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder.write_folder(tmp_path_factory.mktemp("ends"))


class Command:
    """`superstep serve` in a process group of its own, as a shell's job is."""

    def __init__(self, folder, *flags):
        command = [sys.executable, "-m", "superstep", "serve", str(folder), "--port", "0", "--serve.kernels", "off"]
        command += flags
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        self.lines = []
        self.url = ""
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://127.0.0.1:\d+", line):
                self.url = found[0]
                break
        assert self.url, self.lines
        self._family = psutil.Process(self.process.pid).children(recursive=True)
        self._reading = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self._reading.start()

    def end(self, seconds=60):
        """The exit status, and all that was said; nobody is left."""
        status = self.process.wait(seconds)
        assert not psutil.wait_procs(self._family, timeout=10)[1]
        self._reading.join(10)
        return status, "".join(self.lines)


class Asked(threading.Thread):
    """A client that waits for its answer."""

    def __init__(self, url, body):
        super().__init__(daemon=True)
        self._url, self._body = url, body
        self.status, self.text, self.has_begun = 0, "", threading.Event()
        self.start()

    def run(self):
        with httpx.stream("POST", f"{self._url}/generate", json=self._body, timeout=120) as answer:
            self.status = answer.status_code
            for text in answer.iter_text():
                self.text += text
                self.has_begun.set()


def wait_until(is_so, seconds=60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def _pause(command):
    headers = {"authorization": "Bearer key"}
    assert httpx.post(f"{command.url}/admin/pause?mode=keep", headers=headers, timeout=60).status_code == 200


def _under_way(url):
    text = httpx.get(f"{url}/metrics", timeout=60).text
    kinds = ("running", "waiting")
    return sum(float(re.search(rf"^vllm:num_requests_{kind}{{.*}} (\S+)", text, re.MULTILINE)[1]) for kind in kinds)


def _last(stream):
    return json.loads(stream.text.splitlines()[-1])


def test_it_drains_and_a_second_signal_ends_what_is_unfinished(folder):
    """Signals go to the whole group, as `timeout` and terminals send them. The engine is paused: no answer would end by
    itself.
    """
    command = Command(folder, "--grace-s", "600", "--serve.admin-key", "key")
    try:
        streams = [Asked(command.url, body(900, stream=True, n=4)) for _ in range(12)]
        assert all(one.has_begun.wait(60) for one in streams)
        _pause(command)
        wholes = [Asked(command.url, body(900, n=4)) for _ in range(12)]
        wait_until(lambda: _under_way(command.url) >= 48)
        os.killpg(command.process.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{command.url}/health", timeout=60).json()["status"] == "draining")
        assert httpx.get(f"{command.url}/health", timeout=60).status_code == 503
        refused = httpx.post(f"{command.url}/generate", json=body(900), timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        while streams[0].is_alive():  # one that comes with the first is the same: `timeout` sends two
            os.killpg(command.process.pid, signal.SIGTERM)
            streams[0].join(0.3)
        status, said = command.end()
        assert status == 128 + signal.SIGTERM
        for one in (*streams, *wholes):
            one.join(60)
        assert [(one.status, json.loads(one.text)["error"]["code"]) for one in wholes] == [(503, "draining")] * 12
        assert [(one.status, _last(one)["error"]["code"]) for one in streams] == [(200, "draining")] * 12
        assert re.search(r"\d+ requests under way have 600 s", said)
        assert not re.search("Traceback|fault|rror", said)
    finally:
        command.process.kill()


def test_who_is_answered_within_the_grace_loses_nothing(folder):
    command = Command(folder, "--grace-s", "600")
    try:
        streams = [Asked(command.url, body(60, stream=True, n=2)) for _ in range(8)]
        assert all(one.has_begun.wait(60) for one in streams)
        wholes = [Asked(command.url, body(60)) for _ in range(8)]
        wait_until(lambda: _under_way(command.url) >= 20 or not any(one.is_alive() for one in wholes))
        os.killpg(command.process.pid, signal.SIGTERM)
        status, said = command.end(300)
        for one in (*streams, *wholes):
            one.join(60)
        assert [_last(one)["usage"]["completion_tokens"] for one in streams] == [120] * 8
        assert [json.loads(one.text)["usage"]["completion_tokens"] for one in wholes] == [60] * 8
        assert status == 0
        assert not re.search("Traceback|fault|rror", said)
    finally:
        command.process.kill()


@pytest.mark.parametrize(("tokens", "expected"), [(60, 0), (900, 128 + signal.SIGTERM)], ids=["drained", "ended"])
def test_ranks_that_share_a_model_get_the_signal_too_and_leave_quietly(folder, tokens, expected):
    """None of them is taken for a lost one, and no engine is started again."""
    command = Command(folder, "--plan.tp", "2", "--grace-s", "600", "--serve.admin-key", "key")
    try:
        streams = [Asked(command.url, body(tokens, stream=True, n=2)) for _ in range(4)]
        assert all(one.has_begun.wait(60) for one in streams)
        if expected:
            _pause(command)
        os.killpg(command.process.pid, signal.SIGTERM)
        while expected and streams[0].is_alive():
            os.killpg(command.process.pid, signal.SIGTERM)
            streams[0].join(0.3)
        status, said = command.end(300)
        for one in streams:
            one.join(60)
        assert status == expected
        for one in streams:
            told = _last(one)
            assert told["error"]["code"] == "draining" if expected else told["usage"]["completion_tokens"] == 120
        assert said.count("on 2 ranks") == 1
        assert not re.search("Traceback|fault|rror|again", said.replace("a second signal ends them now", ""))
    finally:
        command.process.kill()


def test_a_server_whose_model_was_removed_ends_with_the_reason_when_its_rank_is_lost(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    command = Command(model)
    try:
        shutil.rmtree(model)
        (rank,) = ranks.ranks_below(psutil.Process(command.process.pid))
        rank.kill()
        status, said = command.end()
        assert status == 2
        assert f"superstep: '{model}' holds no config.json" in said.splitlines()[-1]
    finally:
        command.process.kill()


@pytest.mark.parametrize("verb", [["serve", "model"], ["tune", "serve", "model"], ["grade", "serve", "nowhere.py"]])
def test_a_port_that_is_taken_is_told_before_anything_is_loaded(verb, tmp_path, monkeypatch, capsys):
    """Of weights and graders that cannot be read nothing is said: the port comes first."""
    from superstep.cli.main import main

    monkeypatch.chdir(tmp_path)
    (model_folder.write_folder(tmp_path / "model") / "model.safetensors").write_bytes(b"torn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*verb, "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert f"port = {port} cannot be listened on" in err
    assert err.count("\n") == 1
