"""Files that never answer: the deed is refused after its time, answers go on, and the next change works."""

import asyncio
import threading
import time
from dataclasses import replace

import httpx
import pytest
from test_weights import EXACT, tensors_of

from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from superstep.errors import StateError
from superstep.model import hf
from superstep.model.hf import save_weights
from superstep.serve.api import admin as admin_module
from superstep.serve.api.app import make_app
from superstep.serve.api.steered import Admin
from superstep.serve.compute import adapter_orders
from superstep.serve.load import open_both
from superstep.serve.messages import Change, LoadAdapter, Standing
from superstep.serve.reader import Reader
from superstep.serve.request import Info, Request, Sampling

FAST = replace(EXACT, exact=False)
SOON_S = 0.2


@pytest.fixture
def folder(tmp_path):
    save_weights(tmp_path / "model", *tensors_of(0))
    save_weights(tmp_path / "hangs", *tensors_of(1))
    save_weights(tmp_path / "good", *tensors_of(2))
    return tmp_path


@pytest.fixture
def held(monkeypatch):
    """Files under a folder called 'hangs' are not answered until the test ends."""
    end, header = threading.Event(), hf._read_header

    def read_header(file):
        if file.parent.name == "hangs":
            end.wait()
        header(file)

    monkeypatch.setattr(hf, "_read_header", read_header)
    yield
    end.set()


def after(engine, steward, deed):
    """What is said of a deed, and the tokens of a request under way meanwhile."""
    steward.ask(1, deed)
    tokens, give_up_s = 0, time.monotonic() + 120
    while time.monotonic() < give_up_s:
        for done in steward.tick():
            return done, tokens
        if engine.is_idle:
            steward.rest()
            engine.add(Request(id=0, prompt=(7, 3, 9), sampling=Sampling(max_tokens=8, ignore_eos=True)))
        tokens += sum(len(news.tokens) for news in engine.step())
    raise AssertionError(f"{deed} has no end")


@pytest.mark.usefixtures("held")
def test_weights_that_never_come_are_refused_while_answers_go_on(folder):
    engine, steward = open_both(folder / "model", FAST)
    version, party = engine.info.version, steward._model.party
    party._timeout_s = SOON_S
    done, tokens = after(engine, steward, Change(str(folder / "hangs")))
    assert f"{folder / 'hangs'} was not read: nothing came for 0.2 s" in done.why
    assert tokens > 0
    assert engine.info.version == version
    party._timeout_s = 60.0
    done, _ = after(engine, steward, Change(str(folder / "good")))
    assert not done.why
    assert engine.info.version != version


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("keeps_weights", [False, True])
def test_an_engine_whose_weights_never_come_sleeps_on_and_wakes_with_others(folder, keeps_weights):
    engine, steward = open_both(folder / "model", FAST)
    steward.sleep(keeps_weights=keeps_weights)
    steward._model.party._timeout_s = SOON_S
    with pytest.raises(StateError, match="nothing came for"):
        steward.wake(folder / "hangs")
    assert steward.standing.state == "asleep"
    steward._model.party._timeout_s = 60.0
    steward.wake(folder / "good")
    assert steward.standing.state == "serving"
    done, _ = after(engine, steward, Change(str(folder / "model")))
    assert not done.why


def test_an_adapter_that_never_comes_is_refused_while_answers_go_on(folder, monkeypatch):
    engine, steward = open_both(folder / "model", FAST)
    end = threading.Event()

    def read_adapter(path, linears):
        if path.name == "hangs":
            end.wait()
        raise StateError("read to the end")

    monkeypatch.setattr(adapter_orders, "read_adapter", read_adapter)
    adapters = steward._model._forward.adapters
    adapters.timeout_s = SOON_S
    done, tokens = after(engine, steward, LoadAdapter("a", str(folder / "hangs")))
    assert "was not read: nothing came for" in done.why
    assert tokens > 0
    adapters.timeout_s = 60.0
    done, _ = after(engine, steward, LoadAdapter("a", str(folder / "good")))
    assert done.why == "read to the end"
    end.set()


def test_reading_that_gets_on_is_not_given_up_and_what_comes_late_is_dropped():
    late, end, dropped = threading.Event(), threading.Event(), []

    def work(progress):
        end.wait()
        return "late"

    def drop(result):
        dropped.append(result)
        late.set()

    reader = Reader("a path", work, timeout_s=SOON_S, drop=drop)
    with pytest.raises(StateError, match="a path was not read"):
        reader.result()
    end.set()
    assert late.wait(60)
    assert dropped == ["late"]
    with pytest.raises(StateError):
        reader.result()

    def steady(progress):
        for _ in range(40):
            time.sleep(0.05)
            progress()
        return "all"

    assert Reader("a path", steady, timeout_s=1.5).result() == "all"


def test_health_is_answered_while_a_path_is_looked_for(tmp_path, monkeypatch):
    end = threading.Event()

    class Engine:
        standing = Standing(version="v1", path="/a")

        async def do(self, deed):
            return self.standing

    def allowed(path, folders):
        if path == "hangs":
            end.wait()
        return tmp_path

    monkeypatch.setattr(admin_module, "allowed", allowed)
    tokenizer = small_tokenizer()
    info = Info(name="m", vocab=300, context_tokens=9, version="v1", end_of_text=(tokenizer.end_of_text,))
    key = Admin(key="key", folders=[tmp_path], engine=Engine(), timeout_s=1.0)
    app = make_app(Scripted(info, lambda request: []), PlainWords(tokenizer), admin=key)

    async def ask():
        headers = {"Authorization": "Bearer key"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            change = asyncio.create_task(client.post("/admin/weights", json={"path": "hangs"}, headers=headers))
            await asyncio.sleep(0.1)
            health = await client.get("/health")
            refused = await change
            return health, refused, await client.post("/admin/weights", json={"path": "good"}, headers=headers)

    try:
        health, refused, changed = asyncio.run(ask())
    finally:
        end.set()
    assert health.status_code == 200
    assert refused.status_code == 400
    assert "hangs was not read: nothing came for 1 s" in refused.json()["error"]["message"]
    assert changed.status_code == 200
