"""A run's report served while it goes on: who may ask, what is answered, and that the run is told of none of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

import browser
import told_runs
from seen_pages import READY, Seen
from superstep.cli.train.live_report import LiveReport
from superstep.errors import ConfigError
from superstep.observe import tail_jsonl
from superstep.observe.page import live_server as served_module
from superstep.observe.page.bundle_html import unpack
from superstep.observe.page.live_server import LiveServer, ServedPage
from superstep.train.run_folder.run_paths import RunFolder

TOKEN = "a-token-of-the-test"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(served_module, "LOOK_S", 0.02)
    monkeypatch.setattr(served_module, "SHARE", 1.0)


class Told:
    """A run that tells its steps when it is asked to."""

    def __init__(self, root):
        self.folder = RunFolder(root=root)
        self.lines = list(told_runs.lines())

    def tell(self, count):
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            for line in self.lines[:count]:
                file.write(json.dumps(line) + "\n")
        del self.lines[:count]


@pytest.fixture
def told(tmp_path):
    return Told(tmp_path)


@contextmanager
def serving(shown):
    served = LiveServer(0, TOKEN)
    served.begin(shown)
    try:
        yield served
    finally:
        served.close()


@contextmanager
def asked(served, path, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    try:
        connection.request("GET", path, headers=headers or {})
        yield connection.getresponse()
    finally:
        connection.close()


def answer(served, path, headers=None):
    with asked(served, path, headers) as found:
        return found.status, found.read().decode()


def event(response):
    """The next event of a stream: its name and what it says."""
    name, data = "message", ""
    while (text := response.readline().decode().rstrip("\n")) or not data:
        field, _, value = text.partition(": ")
        if field == "event":
            name = value
        if field.startswith("data"):
            data = value or " "
    return name, data


def test_only_who_has_the_token_is_answered(told):
    with serving(LiveReport(told.folder).make_page()) as served:
        assert served.url == f"http://127.0.0.1:{served.port}/?token={TOKEN}"
        for path in ("/", "/events", "/metrics", "/else"):
            for given in ("", "?token=", f"?token={TOKEN}x", "?token=%ff"):
                status, text = answer(served, path + given)
                assert status == 403
                assert TOKEN not in text
        assert answer(served, "/metrics", {"Authorization": f"Bearer {TOKEN}"})[0] == 200
        assert answer(served, f"/else?token={TOKEN}") == (404, "the paths are /, /events and /metrics.\n")
        status, page = answer(served, f"/?token={TOKEN}")
        assert status == 200
        assert "connect-src 'self'" in page
        assert TOKEN not in page, "a page that is saved gives nobody the token"


def test_a_page_whose_name_was_made_to_lead_here_is_refused(told):
    with serving(LiveReport(told.folder).make_page()) as served:
        for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example"):
            status, text = answer(served, f"/?token={TOKEN}", {"Host": host})
            assert (status, text) == (421, "the Host header is not of this server; use localhost.\n")
        assert answer(served, f"/?token={TOKEN}", {"Host": f"localhost:{served.port}"})[0] == 200


def test_the_numbers_are_what_prometheus_reads(told):
    with serving(LiveReport(told.folder).make_page()) as served:

        def numbers():
            status, text = answer(served, f"/metrics?token={TOKEN}")
            assert status == 200
            families = list(text_string_to_metric_families(text))
            found = {sample.name: sample for family in families for sample in family.samples}
            assert all(sample.labels == {"run": str(told.folder.root)} for sample in found.values())
            return {name: sample.value for name, sample in found.items()}

        assert numbers() == {
            f"superstep:{name}_total": 0 for name in ("checkpoints", "resumes", "rollbacks", "retries", "warnings")
        }, "before the run has begun"
        steps = [line for line in told.lines if line["event"] == "step"]
        told.tell(120)
        found = numbers()
        done = [line for line in steps if line["step"] <= found["superstep:steps_total"]]
        assert found["superstep:train_loss"] == done[-1]["loss"]
        assert found["superstep:tokens_total"] == 4096 * len(done)
        assert found["superstep:checkpoints_total"] == 1
        assert found["superstep:told_timestamp_seconds"] == pytest.approx(told.folder.metrics.stat().st_mtime)
        # What a loss that is not finite is told as is not a number; the others stand.
        told.lines.insert(0, steps[-1] | {"loss": None, "step": 900})
        told.tell(1)
        assert "superstep:train_loss" not in numbers()
        assert numbers()["superstep:steps_total"] == 900


def test_who_listens_is_told_of_more_and_of_the_end(told):
    told.tell(5)
    with serving(LiveReport(told.folder).make_page()) as served, asked(served, f"/events?token={TOKEN}") as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        name, data = event(stream)
        assert name == "message"
        assert unpack(data)["runs"][0]["steps"] == 4
        told.tell(3)
        seen = unpack(event(stream)[1])["runs"][0]
        assert seen["steps"] == 7
        # A run that goes back puts another file in the place of the first.
        beside = told.folder.root / "beside"
        beside.write_text("".join(f"{json.dumps(line)}\n" for line in list(told_runs.lines())[:3]))
        beside.replace(told.folder.metrics)
        assert unpack(event(stream)[1])["runs"][0]["steps"] == 2
        with told.folder.metrics.open("ab") as file:
            file.write(b'{"event": "st')
        assert unpack(event(stream)[1])["runs"][0]["steps"] == 2, "a line without its end is none yet"
        threading.Thread(target=served.close).start()
        while (told_last := event(stream))[0] == "message":
            pass
        assert told_last[0] == "over"


def test_an_update_is_made_once_for_all_and_seldom_where_it_takes_long(monkeypatch):
    monkeypatch.setattr(served_module, "SHARE", 0.02)
    now, stamps, made = [0.0], iter(range(10_000)), []

    def update():
        made.append(now[0])
        now[0] += 1.0
        return "x"

    served = LiveServer(0, TOKEN, clock=lambda: now[0])
    served.shown = ServedPage(page=str, stamp=lambda: next(stamps), update=update, metrics=str)
    for _ in range(300):
        served._update()
        now[0] += 0.5
    assert len(made) == 4
    assert all(later - before >= 50.0 for before, later in pairwise(made))
    served.shown = None
    served.close()


def test_a_port_that_is_taken_is_refused_by_its_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--web-port = {port} cannot be listened on .*choose another, or 0"):
            LiveServer(port, TOKEN)


def test_what_cannot_be_read_now_is_said_and_more_listeners_than_there_is_room_for_are_refused(told, monkeypatch):
    monkeypatch.setattr(served_module, "MOST_LISTENERS", 1)
    shown = LiveReport(told.folder).make_page()

    def broken():
        raise OSError("the disk is away")

    broken_page = ServedPage(page=broken, stamp=shown.stamp, update=shown.update, metrics=shown.metrics)
    told.tell(3)
    with serving(broken_page) as served:
        assert answer(served, f"/?token={TOKEN}") == (503, "not now: the disk is away\n")
        with asked(served, f"/events?token={TOKEN}") as stream:
            event(stream)
            assert answer(served, f"/events?token={TOKEN}") == (503, "1 pages listen already; close one.\n")
        assert answer(served, f"/metrics?token={TOKEN}")[0] == 200


def test_what_is_read_again_is_only_what_is_new(told, monkeypatch):
    texts = []
    monkeypatch.setattr(tail_jsonl, "parse_line", lambda text: texts.append(text) or json.loads(text))
    one = tail_jsonl.GrowingFile(told.folder.metrics)
    assert one.read() == []
    told.tell(3)
    assert len(one.read()) == len(texts) == 3
    told.tell(2)
    assert len(one.read()) == len(texts) == 5


@pytest.mark.skipif(browser.PATH is None, reason=f"none of {', '.join(browser.NAMES)} is installed")
def test_the_page_follows_the_run_and_keeps_what_was_chosen(told, tmp_path):
    told.tell(150)
    updates = "window.superstep && superstep.R.updates"
    with serving(LiveReport(told.folder).make_page()) as served, browser.browser() as tab:
        seen = Seen(tab, tmp_path)
        tab.call("Page.navigate", url=served.url)
        tab.wait_for(f"{READY} && {updates} === 1")
        assert seen("document.getElementById('live').textContent") == "live"
        seen("superstep.R.plots.forEach((plot) => plot.setScale('x', {min: 20, max: 60}))")
        last = max(line["step"] for line in told.lines[:50] if line["event"] == "step")
        told.tell(50)
        # Many lines may come in several parts.
        tab.wait_for(f"{updates} > 1 && superstep.R.runs[0].step.at(-1) === {last}")
        assert seen("[superstep.R.plots[0].scales.x.min, superstep.R.plots[0].scales.x.max]") == [20, 60]
        tab.click("#whole")
        assert seen("superstep.R.plots[0].scales.x.max") == last
        seen.is_accessible()
        served.close()
        tab.wait_for("document.getElementById('live').classList.contains('over')")
        tab.look(width=390, height=844)
        seen.fits()
        assert "has ended" in seen("document.getElementById('live').textContent")
        faults = [m["params"] for m in tab.told if m["method"] == "Runtime.exceptionThrown"]
        assert faults == []
