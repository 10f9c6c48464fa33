"""Paths under /admin: absent without a key, closed to who does not know it, and what they do to a server under load."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file

import low_rank
import model_folder
from plain_words import PlainWords, small_tokenizer
from ranks import ranks_below
from scripted import Scripted
from served import served
from superstep.cli.serve.serve import admin_key
from superstep.errors import ConfigError, StateError
from superstep.http.request_error import RequestError
from superstep.model.files.hf import FILE
from superstep.model.files.peft_adapter import linears_of, write_adapter
from superstep.plan.model.hf_config import from_hf_config
from superstep.serve.api.admin import ADMIN_ROUTES, allow_path
from superstep.serve.api.admin_backend import Admin
from superstep.serve.api.backend import BackendAway
from superstep.serve.app import make_app
from superstep.serve.config import ServeConfig
from superstep.serve.files.weights import publish
from superstep.serve.processes.engine_client import EngineClient
from superstep.serve.scheduling.engine_messages import (
    ChangeWeights,
    EngineStatus,
    LoadAdapter,
    Pause,
    Resume,
    Sleep,
    UnloadAdapter,
    Wake,
)
from superstep.serve.scheduling.request import AdapterInfo, ModelInfo
from superstep.serve.text_backend import load_words

KEY = "a-key"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


class Told:
    """An engine that notes what it is told."""

    def __init__(self):
        self.standing = EngineStatus(version="v1", path="/models/a")
        self.deeds = []
        self.fails = None

    async def do(self, deed):
        self.deeds.append(deed)
        if self.fails is not None:
            raise self.fails
        return self.standing


@pytest.fixture
def engine():
    return Told()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights" / "new").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "weights" / "way-out").symlink_to(tmp_path / "secret")
    (tmp_path / "weights" / "round").symlink_to(tmp_path / "weights" / "round")
    return tmp_path / "weights"


def answers(engine, folder, *asked, admin=True):
    """The responses to some requests, each a method, a path and what httpx takes."""
    tokenizer = small_tokenizer()
    info = ModelInfo(name="m", vocab=300, context_tokens=9, version="v1", end_of_text=(tokenizer.end_of_text,))
    key = Admin(key=KEY, folders=[folder], engine=engine) if admin else None
    app = make_app(Scripted(info, lambda request: [], adapters=("tone",)), PlainWords(tokenizer), admin=key)

    async def all_of_them():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return [await client.request(method, path, **given) for method, path, given in asked]

    return asyncio.run(all_of_them())


def test_without_a_key_the_paths_are_as_any_that_is_not_there(engine, folder):
    every = [(method, path, {"headers": WITH_KEY}) for method, path, _ in ADMIN_ROUTES]
    found = answers(engine, folder, *every, ("GET", "/nowhere", {}), admin=False)
    assert {answer.status_code for answer in found} == {404}
    told = {answer.json()["error"]["message"].partition(" ")[2] for answer in found}
    assert len(told) == 1
    assert "admin" not in told.pop()


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer a-ke", "Bearer a-keyy", "Basic a-key", "a-key", "Bearer é"])
def test_who_does_not_know_the_key_does_nothing(engine, folder, given):
    headers = {"Authorization": given.encode("latin-1")} if given else {}
    every = [(method, path, {"headers": headers}) for method, path, _ in ADMIN_ROUTES]
    for answer in answers(engine, folder, *every):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"
        assert KEY not in answer.text
    assert engine.deeds == []


def test_each_path_is_one_deed(engine, folder):
    new = str(folder / "new")
    asked = [
        ("POST", "/admin/weights", {"json": {"path": "new"}}),
        ("POST", "/admin/weights", {"json": {"path": new, "requests": "keep"}}),
        ("POST", "/admin/pause", {}),
        ("POST", "/admin/pause?mode=abort", {}),
        ("POST", "/admin/resume", {}),
        ("POST", "/admin/sleep", {}),
        ("POST", "/admin/sleep?weights=keep", {}),
        ("POST", "/admin/wake", {}),
        ("POST", "/admin/wake", {"json": {"path": "new"}}),
        ("GET", "/admin/weights", {}),
        ("POST", "/admin/abort", {}),
    ]
    *found, aborted = answers(engine, folder, *((m, p, given | {"headers": WITH_KEY}) for m, p, given in asked))
    assert engine.deeds == [
        ChangeWeights(new),
        ChangeWeights(new, "keep"),
        Pause("keep"),
        Pause("abort"),
        Resume(),
        Sleep(keeps_weights=False),
        Sleep(keeps_weights=True),
        Wake(None),
        Wake(new),
    ]
    for answer in found:
        assert answer.json() == {"state": "serving", "version": "v1", "path": "/models/a", "changes": 0, "adapters": []}
    assert aborted.json() == {"aborted": 0}


def test_adapters_are_listed_loaded_and_unloaded(engine, folder):
    engine.standing = EngineStatus(adapters=(AdapterInfo(name="tone", version="v7"),))
    asked = [
        ("GET", "adapters", {}),
        ("POST", "adapters", {"json": {"name": "a/b", "path": "new"}}),
        ("DELETE", "adapters/tone", {}),
        ("DELETE", "adapters/tune", {}),
        ("POST", "adapters", {"json": {"name": "m", "path": "new"}}),
        ("POST", "adapters", {"json": {"name": "x", "path": "way-out"}}),
        ("POST", "adapters", {"json": {"path": "new"}}),
    ]
    found = answers(engine, folder, *((m, f"/admin/{p}", given | {"headers": WITH_KEY}) for m, p, given in asked))
    assert engine.deeds == [LoadAdapter("a/b", str(folder / "new")), UnloadAdapter("tone")]
    assert [answer.json() for answer in found[:3]] == [{"adapters": [{"name": "tone", "version": "v7"}]}] * 3
    refused = [(answer.status_code, answer.json()["error"]["message"]) for answer in found[3:]]
    assert [status for status, _ in refused] == [404, 400, 403, 400]
    for (_, message), said in zip(
        refused, ["did you mean 'tone'", "is the model's own", "outside of", "name is missing"], strict=True
    ):
        assert said in message


@pytest.mark.parametrize(
    ("path", "given", "status", "said"),
    [
        ("weights", {"json": {"path": "../secret"}}, 403, "outside of the folders"),
        ("weights", {"json": {"path": "/etc/passwd"}}, 403, "outside of the folders"),
        ("weights", {"json": {"path": "way-out"}}, 403, "outside of the folders"),
        ("wake", {"json": {"path": "new/../../secret"}}, 403, "outside of the folders"),
        ("weights", {"json": {"path": "nothing"}}, 400, "path = 'nothing' is not there"),
        ("weights", {"json": {"path": "a\0b"}}, 400, "holds a NUL"),
        ("weights", {"json": {"path": "x" * 5000}}, 400, "path = "),
        ("weights", {"json": {"path": "round"}}, 400, "path = 'round'"),
        ("weights", {"json": {"path": ""}}, 400, "path = ''"),
        ("weights", {"json": {"path": 7}}, 400, "path = 7"),
        ("weights", {"json": {}}, 400, "path is missing"),
        ("weights", {"json": {"path": "new", "request": "keep"}}, 400, "did you mean 'requests'"),
        ("weights", {"json": {"path": "new", "requests": "later"}}, 400, "requests = 'later'"),
        ("weights", {"content": b"{}"}, 415, "content-type"),
        ("pause?mode=later", {}, 400, "mode = 'later' must be one of abort, wait, keep"),
        ("pause?mod=keep", {}, 400, "mod is not a field"),
        ("sleep?weights=half", {}, 400, "weights = 'half' must be one of drop, keep"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(engine, folder, path, given, status, said):
    headers = WITH_KEY | ({"content-type": "text/plain"} if "content" in given else {})
    (answer,) = answers(engine, folder, ("POST", f"/admin/{path}", given | {"headers": headers}))
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    assert engine.deeds == []


def test_a_path_is_looked_for_in_each_folder(folder):
    (folder.parent / "other").mkdir()
    folders = [folder.parent / "other", folder]
    assert allow_path("new", folders) == allow_path(str(folder / "new"), folders) == folder / "new"
    with pytest.raises(RequestError, match="is not there"):
        allow_path("way-out", folders)


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (StateError("w: a.weight has other bits than were written."), 400, "path"),
        (ConfigError("wake: the engine is not asleep."), 400, None),
        (BackendAway("the engine is restarting; ask again."), 503, None),
    ],
)
def test_what_cannot_be_done_is_told(engine, folder, error, status, param):
    engine.fails = error
    (answer,) = answers(engine, folder, ("POST", "/admin/weights", {"json": {"path": "new"}, "headers": WITH_KEY}))
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert str(error) in answer.json()["error"]["message"]


def test_a_key_comes_from_a_file_the_command_line_or_the_environment(tmp_path):
    (tmp_path / "key").write_text("of-a-file\n")
    assert admin_key(None, None) is None
    assert admin_key(None, "found") == "found"
    assert admin_key("asked", "found") == "asked"
    assert admin_key(f"@{tmp_path}/key", "found") == "of-a-file"
    for asked, found, said in [
        ("", None, "serve.admin_key must be"),
        (None, "two words", "SUPERSTEP_ADMIN_KEY must be"),
        (None, "", "SUPERSTEP_ADMIN_KEY must be"),
        (f"@{tmp_path}/none", None, "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=said):
            admin_key(asked, found)


class Server:
    """A server of one rank, in a process of its own, and what is asked of it."""

    def __init__(self, url):
        self.client = httpx.Client(base_url=url, timeout=60)

    def admin(self, path, body=None, method="POST"):
        given = {} if body is None else {"json": body}
        return self.client.request(method, f"/admin/{path}", headers=WITH_KEY, **given)

    def ask(self, number=0, tokens=12):
        sampling = {"max_tokens": tokens, "seed": number, "ignore_eos": True}
        return self.client.post("/generate", json={"prompt": [7, 3, 9, number + 1], "sampling": sampling})

    def ask_adapter(self, number=0, name="tone"):
        sampling = {"max_tokens": 12, "seed": number, "ignore_eos": True}
        return self.client.post(
            "/generate", json={"prompt": [7, 3, 9, number + 1], "sampling": sampling, "adapter": name}
        )

    def health(self):
        answer = self.client.get("/health")
        return answer.status_code, answer.json()["status"]

    def wait_for(self, is_so, seconds=60):
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def told_by(answer):
    """Tokens, their log-probabilities and versions."""
    (one,) = answer.json()["answers"]
    return [one[name] for name in ("tokens", "logprobs", "versions")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def server(tmp_path_factory, root):
    folder = model_folder.write_folder(tmp_path_factory.mktemp("model"), layers=2, width=32, heads=4, head_dim=8)
    host = EngineClient(folder, ServeConfig(compute="fp32", context_tokens=128), name="small")
    info = host.open()
    try:
        app = make_app(host, load_words(folder, info.vocab), admin=Admin(key=KEY, folders=[root, folder], engine=host))
        with served(app) as at:
            server = Server(at.url)
            server.own = load_file(folder / FILE)
            server.folder = folder
            yield server
    finally:
        host.close()


@pytest.fixture(scope="module")
def made(server, root):
    """Snapshots of other weights."""
    return [publish(root, {n: x * (1 + k / 10) for n, x in server.own.items()}, keep=9) for k in range(1, 4)]


@pytest.mark.multiproc
def test_weights_change_while_clients_are_answered(server, made):
    found, is_over = [], threading.Event()

    def ask(number):
        while not is_over.is_set():
            found.append(server.ask(number))
            number += 10

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in asking:
        thread.start()
    told = [server.admin("weights", {"path": made[k % 3].path.name}) for k in range(10)]
    is_over.set()
    for thread in asking:
        thread.join(60)
    assert [answer.json()["version"] for answer in told] == [made[k % 3].version for k in range(10)]
    assert {answer.status_code for answer in found} == {200}
    columns = [answer.json()["answers"][0] for answer in found]
    assert all(len(one["tokens"]) == len(one["versions"]) == 12 for one in columns)
    assert {version for one in columns for version in one["versions"]} >= {one.version for one in made}
    assert server.health() == (200, "ready")
    assert server.client.get("/health").json()["version"] == made[0].version
    assert set(server.ask().json()["answers"][0]["versions"]) == {made[0].version}


@pytest.mark.multiproc
def test_damaged_weights_are_refused_and_the_old_ones_answer(server, made, root):
    before = server.admin("weights", method="GET").json()
    bad = publish(root, {n: x * 2 for n, x in server.own.items()}, keep=9).path
    data = bytearray((bad / FILE).read_bytes())
    data[-1] ^= 64
    (bad / FILE).write_bytes(data)
    answer = server.admin("weights", {"path": bad.name})
    assert answer.status_code == 400
    assert "model.norm.weight has other bits than were written" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "path"
    assert server.admin("weights", method="GET").json() == before
    assert server.ask().status_code == 200


@pytest.mark.multiproc
def test_a_pause_holds_answers_or_refuses_them_and_sleep_gives_memory_back(server):
    alone = told_by(server.ask(5))
    assert server.admin("pause?mode=keep").json()["state"] == "paused"
    assert server.health() == (503, "paused")
    found = []
    asking = threading.Thread(target=lambda: found.append(server.ask(5)))
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    assert server.admin("resume").json()["state"] == "serving"
    asking.join(60)
    assert told_by(found[0]) == alone
    for path, state in (("pause?mode=abort", "paused"), ("sleep", "asleep")):
        server.admin(path)
        assert server.health() == (503, state)
        refused = server.ask(5)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert state in refused.json()["error"]["message"]
        assert server.admin("wake" if state == "asleep" else "resume").json()["state"] == "serving"
        assert server.health() == (200, "ready")
    assert told_by(server.ask(5)) == alone
    assert server.admin("wake").status_code == 400


@pytest.mark.multiproc
def test_a_lost_rank_comes_back_with_the_newest_weights_and_paused_where_it_was(server, made, root):
    assert server.admin("weights", {"path": made[1].path.name}).json()["version"] == made[1].version
    newest = told_by(server.ask(5))
    publish(root, {n: x * 3 for n, x in server.own.items()}, keep=1)
    assert Path(made[1].path).exists()  # the server holds it
    assert not Path(made[2].path).exists()
    assert server.admin("pause").json()["state"] == "paused"
    found = []
    asking = threading.Thread(target=lambda: found.append(server.ask(5)))
    asking.start()
    rank = ranks_below(psutil.Process())[-1]
    asking.join(0.3)
    rank.kill()
    asking.join(60)
    assert found[0].status_code == 503
    server.wait_for(lambda: server.health() == (503, "paused"))
    assert server.admin("weights", method="GET").json()["version"] == made[1].version
    assert server.admin("resume").json()["state"] == "serving"
    assert told_by(server.ask(5)) == newest


@pytest.mark.multiproc
def test_adapters_change_while_clients_are_answered_and_come_back_with_a_lost_rank(server, root):
    linears = linears_of(from_hf_config(server.folder / "config.json"))
    for name, seed in (("a", 1), ("b", 2)):
        write_adapter(root / "adapters" / name, low_rank.random_adapter(seed, linears=linears))
    load = {"name": "tone", "path": "adapters/a"}
    versions = {
        server.admin("adapters", load | {"path": f"adapters/{k}"}).json()["adapters"][0]["version"] for k in "ab"
    }
    assert len(versions) == 2
    assert [one["id"] for one in server.client.get("/v1/models").json()["data"]] == ["small", "tone"]
    found, is_over = [], threading.Event()

    def ask(number):
        while not is_over.is_set():
            found.append(server.ask_adapter(number))

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in asking:
        thread.start()
    told = [server.admin("adapters", load | {"path": f"adapters/{'ab'[k % 2]}"}).status_code for k in range(21)]
    server.wait_for(lambda: len(found) >= 8)
    is_over.set()
    for thread in asking:
        thread.join(60)
    assert set(told) == {answer.status_code for answer in found} == {200}
    seen = [set(answer.json()["answers"][0]["versions"]) for answer in found]
    assert all(len(one) == 1 for one in seen)  # an answer ends with the adapter that it began with
    assert {version.partition("+")[2] for one in seen for version in one} <= versions

    before = told_by(server.ask_adapter(5))
    rank = ranks_below(psutil.Process())[-1]
    rank.kill()
    server.wait_for(lambda: server.health()[0] != 200)
    server.wait_for(lambda: server.health() == (200, "ready"))
    assert told_by(server.ask_adapter(5)) == before
    bad = server.admin("adapters", load | {"path": "."})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "path")
    assert "holds no adapter" in bad.json()["error"]["message"]
    assert server.admin("adapters/tone", method="DELETE").json() == {"adapters": []}
    assert server.ask_adapter(5).status_code == 404
