"""superstep train --web: what is refused before anything begins, and a run that is looked at while it trains."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

import runs
from superstep.cli.main import main
from superstep.cli.train import live_report as web_module
from superstep.errors import Fault
from superstep.observe.page.bundle_html import unpack
from superstep.train.throughput import ThroughputMeter

TOKEN = "a-token-of-the-test"


@pytest.fixture
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def get(url):
    with urllib.request.urlopen(url, timeout=20) as response:
        return response.read().decode()


def test_what_cannot_be_served_is_refused_before_anything_begins(place, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--web", "--web-port", port], f"--web-port = {port} cannot be listened on at 127.0.0.1"),
            (["--web", "--web-port", "70000"], "--web-port = 70000 is not a port"),
            (["--web-port", port], f"--web-port = {port} needs --web"),
        ]
        for flags, said in cases:
            assert main(["train", "run.toml", *flags]) == 2
            assert said in capsys.readouterr().err
    monkeypatch.setenv(web_module.TOKEN, "short")
    assert main(["train", "run.toml", "--web"]) == 2
    assert f"{web_module.TOKEN} has 5 characters" in capsys.readouterr().err
    hosts = ["--hosts", "2", "--host", "0", "--meet", "127.0.0.1:1", "--web"]
    monkeypatch.setenv("SUPERSTEP_SECRET", "that of the hosts of a run")
    assert main(["train", "run.toml", *hosts]) == 2
    assert "--web needs ranks that one launcher" in capsys.readouterr().err
    assert sorted(os.listdir(place)) == ["good.txt", "run.toml"]


def test_the_help_says_where_the_token_is(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.partition("--web ")[2].partition("--web-port")[0].split())
    assert "what follows token= in the address that is printed" in said
    assert web_module.TOKEN in said


def test_a_run_is_looked_at_while_it_trains(place, monkeypatch, capsys):
    is_enough, statuses, urls = threading.Event(), [], []

    def took(self, step_s):
        self._steps_s.append(step_s)
        if is_enough.is_set():
            raise Fault("that was enough.", rank=0)

    monkeypatch.setattr(ThroughputMeter, "took", took)
    monkeypatch.setenv(web_module.TOKEN, TOKEN)
    monkeypatch.setattr(web_module, "say", urls.append)
    flags = ["run.toml", "--train.steps", "100000", "--train.eval-every", "5", "--state.save-every", "50000", "--web"]
    training = threading.Thread(target=lambda: statuses.append(main(["train", *flags])))
    training.start()
    try:
        until_s = time.monotonic() + 120
        while not urls or not (place / "run" / "metrics.jsonl").exists():
            assert time.monotonic() < until_s
            assert training.is_alive(), capsys.readouterr()
            time.sleep(0.02)
        url = urls[0].partition(": ")[2]
        base, _, query = url.partition("?")
        assert query == f"token={TOKEN}"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(base)
        assert 'id="live"' in get(url)
        with urllib.request.urlopen(f"{base}events?{query}", timeout=20) as stream:
            counts = []
            while len(counts) < 3 or counts[-1] < 12:
                line = stream.readline().decode()
                if line.startswith("data: "):
                    (run,) = unpack(line.removeprefix("data: "))["runs"]
                    counts.append(run["steps"])
            assert counts == sorted(counts), "it grows"
            assert run["started"]["plan"]
            # What was predicted stands beside what is measured.
            rows = {row[0].strip(): row for row in run["ledger"]}
            assert rows["a step"][1] > 0
            assert rows["a step"][2] > 0
            assert rows["compute"][1] > 0
            assert rows["parameters"][1] > 0
        text = get(f"{base}metrics?{query}")
        numbers = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        lines = {line["step"]: line for line in runs.events(place / "run", "step")}
        assert numbers["superstep:train_loss"] == lines[numbers["superstep:steps_total"]]["loss"]
    finally:
        is_enough.set()
        training.join(60)
    assert statuses == [1]
    with pytest.raises(urllib.error.URLError):
        get(url)
    assert TOKEN not in (place / "run" / "metrics.jsonl").read_text()
    assert json.loads((place / "run" / "metrics.jsonl").read_text().splitlines()[0])["event"] == "started"
