"""Files that never answer: the deed is refused after its time, answers go on, and the next change works."""

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from unittest import mock

import httpx
import pytest
import torch.distributed as dist
from test_weights import EXACT, tensors_of

import low_rank
from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from superstep.comm.device import Device
from superstep.errors import StateError
from superstep.model.files import hf
from superstep.model.files import peft_adapter as adapter_module
from superstep.model.files.hf import save_weights
from superstep.model.files.peft_adapter import linears_of, write_adapter
from superstep.serve.api import admin as admin_module
from superstep.serve.api.admin_backend import Admin
from superstep.serve.app import make_app
from superstep.serve.build_engine import open_both
from superstep.serve.compute import lora as adapters_module
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.files.reader import BackgroundReader
from superstep.serve.load_rank import load_rank
from superstep.serve.processes import admin_commands as deeds_module
from superstep.serve.processes.admin_commands import AdminCommands
from superstep.serve.processes.worker import obey
from superstep.serve.scheduling.engine_messages import (
    ORDERS,
    REPORTS,
    ChangeWeights,
    EndEngine,
    EngineStatus,
    LoadAdapter,
    Pause,
    Resume,
    RunCommand,
    Sleep,
    Wake,
)
from superstep.serve.scheduling.request import ModelInfo, Request, Sampling

SOON_S = 2.0
"""Long enough for a small model on a loaded machine, short enough to wait for."""
FAST = replace(EXACT, exact=False, read_timeout_s=SOON_S)


@pytest.fixture
def folder(tmp_path):
    save_weights(tmp_path / "model", *tensors_of(0))
    save_weights(tmp_path / "hangs", *tensors_of(1))
    save_weights(tmp_path / "good", *tensors_of(2))
    return tmp_path


@pytest.fixture
def held(monkeypatch):
    """Files under a folder called 'hangs' are not answered until the test ends."""
    end, header = threading.Event(), hf.read_header

    def read_header(file):
        if file.parent.name == "hangs":
            end.wait()
        header(file)

    monkeypatch.setattr(hf, "read_header", read_header)
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
    version = engine.info.version
    done, tokens = after(engine, steward, ChangeWeights(str(folder / "hangs")))
    assert f"{folder / 'hangs'} was not read: nothing came for 2 s" in done.why
    assert tokens > 0
    assert engine.info.version == version
    done, _ = after(engine, steward, ChangeWeights(str(folder / "good")))
    assert not done.why
    assert engine.info.version != version


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("keeps_weights", [False, True])
def test_an_engine_whose_weights_never_come_sleeps_on_and_wakes_with_others(folder, keeps_weights):
    engine, steward = open_both(folder / "model", FAST)
    steward.sleep(keeps_weights=keeps_weights)
    with pytest.raises(StateError, match="nothing came for"):
        steward.wake(folder / "hangs")
    assert steward.standing.state == "asleep"
    steward.wake(folder / "good")
    assert steward.standing.state == "serving"
    done, _ = after(engine, steward, ChangeWeights(str(folder / "model")))
    assert not done.why


@contextmanager
def held_adapters():
    """Adapters in a folder called 'hangs' are not read until the block ends, where this rank's reading hangs."""
    end = threading.Event()

    def read_adapter(path, linears):
        if path.name == "hangs":
            end.wait()
        return adapter_module.read_adapter(path, linears)

    with mock.patch.object(adapters_module, "read_adapter", read_adapter):
        try:
            yield
        finally:
            end.set()


def write_adapters(folder):
    for name, seed in {"hangs": 1, "good": 2}.items():
        write_adapter(folder / "adapters" / name, low_rank.random_adapter(seed, linears=linears_of(tensors_of(0)[1])))
    return folder / "adapters"


def test_an_adapter_that_never_comes_is_refused_while_answers_go_on(folder):
    adapters = write_adapters(folder)
    engine, steward = open_both(folder / "model", FAST)
    with held_adapters():
        done, tokens = after(engine, steward, LoadAdapter("a", str(adapters / "hangs")))
        assert f"{adapters / 'hangs'} was not read: nothing came for 2 s" in done.why
        assert tokens > 0
        done, _ = after(engine, steward, LoadAdapter("a", str(adapters / "good")))
    assert not done.why
    assert [one.name for one in done.standing.adapters] == ["a"]


def one_rank_hangs(rank, world, folder, adapters):
    """Two ranks, of which the second reads nothing of a folder called 'hangs'."""
    tp, device, serve = dist.group.WORLD, Device("cpu"), replace(FAST, tp=world)
    if rank > 0:
        mine = load_rank(folder, serve, rank, tp, device)
        with held_adapters():
            follow(mine.forward, tp, device, mine.party)
        return None
    engine, steward = open_both(folder, serve, tp=tp)
    try:
        found = []
        for name in ("hangs", "good"):
            done, tokens = after(engine, steward, LoadAdapter("a", str(adapters / name)))
            found.append((done.why, tokens, [one.name for one in done.standing.adapters]))
        return found
    finally:
        engine.end()


@pytest.mark.multiproc
def test_an_adapter_that_one_rank_cannot_read_holds_up_no_rank(folder, pool):
    adapters = write_adapters(folder)
    refused, taken = pool.run(2, one_rank_hangs, folder / "model", adapters)[0]
    why, tokens, names = refused
    assert f"{adapters / 'hangs'} was not read: nothing came for 2 s" in why
    assert tokens > 0
    assert names == []
    assert taken[0] == ""
    assert taken[2] == ["a"]


def test_a_lock_that_never_comes_holds_up_nothing_that_the_ranks_say(folder, monkeypatch):
    end, released = threading.Event(), threading.Event()

    class Held:
        def close(self):
            released.set()

    def hold(path):
        if path.name != "hangs":
            return None
        end.wait()
        return Held()

    monkeypatch.setattr(deeds_module, "hold", hold)
    deeds = AdminCommands(lambda order: None, folder / "model", {}, read_timeout_s=SOON_S)
    for name in ("hangs", "good"):
        deeds._keep_newest(folder / name)
        assert deeds.newest == folder / name
    end.set()
    assert released.wait(60)
    deeds.close()


HANGS = """
import os, sys, threading, time
from superstep.hardware.host import cores
from superstep.serve.files.reader import BackgroundReader
from superstep.serve.files import weights

def never():
    os.open(sys.argv[1], os.O_RDONLY)

class Hanging(dict):
    def __getitem__(self, name):
        never()

BackgroundReader("a fifo", lambda progress: never())
BackgroundReader("tensors", lambda progress: weights.digests(Hanging(a=1, b=2)))
while sum(thread.name == "reader" for thread in threading.enumerate()) < 2 + min(2, cores()):
    time.sleep(0.01)
print("leaves", flush=True)
"""


def test_a_process_ends_though_its_readings_hang(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path / "fifo")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "leaves\n")


def test_reading_that_gets_on_is_not_given_up_and_what_comes_late_is_dropped():
    late, end, dropped = threading.Event(), threading.Event(), []

    def work(progress):
        end.wait()
        return "late"

    def drop(result):
        dropped.append(result)
        late.set()

    reader = BackgroundReader("a path", work, timeout_s=0.2, drop=drop)
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

    assert BackgroundReader("a path", steady, timeout_s=1.5).result() == "all"


def test_health_is_answered_while_a_path_is_looked_for(tmp_path, monkeypatch):
    end = threading.Event()

    class Engine:
        standing = EngineStatus(version="v1", path="/a")

        async def do(self, deed):
            return self.standing

    def allowed(path, folders):
        if path == "hangs":
            end.wait()
        return tmp_path

    monkeypatch.setattr(admin_module, "allow_path", allowed)
    tokenizer = small_tokenizer()
    info = ModelInfo(name="m", vocab=300, context_tokens=9, version="v1", end_of_text=(tokenizer.end_of_text,))
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


@pytest.mark.usefixtures("held")
def test_who_asks_while_weights_to_wake_with_never_come_is_answered(folder):
    engine, steward = open_both(folder / "model", replace(FAST, read_timeout_s=math.inf))
    mine, its = Pipe()
    ended = threading.Thread(target=obey, args=(engine, steward, its), daemon=True)
    ended.start()

    def said():
        assert mine.poll(60), "nothing is said"
        done = REPORTS.decode(mine.recv_bytes())
        return done.number, done.standing.state, done.why

    mine.send_bytes(ORDERS.encode(RunCommand(1, Sleep())))
    assert said() == (1, "asleep", "")
    for number, deed in enumerate((Wake(str(folder / "hangs")), Resume(), Pause()), 2):
        mine.send_bytes(ORDERS.encode(RunCommand(number, deed)))
    assert said() == (3, "asleep", "resume: the engine is asleep; wake it first.")
    assert said() == (4, "asleep", "")
    mine.send_bytes(ORDERS.encode(EndEngine()))
    ended.join(60)
    assert not ended.is_alive()
