"""Orders of whoever runs a server with several replicas: each reaches all of them, or changes none."""

import asyncio
import threading

import psutil
import pytest
from safetensors.torch import load_file
from test_admin import KEY, Server, told_by

import low_rank
import model_folder
from ranks import ranks_below
from served import served
from superstep.errors import ConfigError, StateError
from superstep.model.files.hf import FILE
from superstep.model.files.peft_adapter import linears_of, write_adapter
from superstep.plan.model.hf_config import from_hf_config
from superstep.serve.api.admin_backend import Admin, EngineGroup
from superstep.serve.api.backend import BackendAway
from superstep.serve.app import make_app
from superstep.serve.config import ServeConfig
from superstep.serve.files.weights import publish
from superstep.serve.processes.load_balancer import replicas_of
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
from superstep.serve.scheduling.request import AdapterInfo
from superstep.serve.text_backend import load_words


class Steady:
    """An engine of which only the standing is real. Knows how to go back, and fails where a test says so."""

    def __init__(self):
        self.standing = EngineStatus(version="/old", path="/old")
        self.is_there = True
        self.fails = None
        self.fails_back = None
        self.deeds = []

    def back(self, deed):
        return [("back", deed)]

    async def do(self, deed):
        self.deeds.append(deed)
        await asyncio.sleep(0)
        fails = self.fails_back if isinstance(deed, tuple) else self.fails
        if fails is not None:
            raise fails
        if isinstance(deed, ChangeWeights):
            self.standing = EngineStatus(version=deed.path, path=deed.path)
        return self.standing


EVERY = [
    ChangeWeights("/new"),
    Pause(),
    Resume(),
    Sleep(),
    Wake(),
    Wake("/new"),
    LoadAdapter("a", "/a"),
    UnloadAdapter("a"),
]


@pytest.mark.parametrize("deed", EVERY, ids=lambda deed: type(deed).__name__)
def test_where_one_fails_the_others_go_back_and_it_is_named(deed):
    engines = [Steady(), Steady(), Steady()]
    engines[1].fails = StateError("path = '/new': damaged.")
    with pytest.raises(StateError, match=r"^path = '/new': damaged. \(replica 1 of 3; the others stay as they were\)$"):
        asyncio.run(EngineGroup(engines).do(deed))
    assert [one.deeds for one in engines] == [[deed, ("back", deed)], [deed], [deed, ("back", deed)]]


def test_all_are_told_and_the_first_that_does_not_serve_is_shown():
    engines = [Steady(), Steady(), Steady()]
    several = EngineGroup(engines)
    assert asyncio.run(several.do(ChangeWeights("/new"))).version == "/new"
    assert [one.deeds for one in engines] == [[ChangeWeights("/new")]] * 3
    engines[2].standing = EngineStatus(state="paused", version="/new")
    assert several.standing.state == "paused"


def test_what_fails_on_all_is_told_as_of_one():
    engines = [Steady(), Steady()]
    for one in engines:
        one.fails = ConfigError("wake: the engine is not asleep.")
    with pytest.raises(ConfigError, match=r"^wake: the engine is not asleep\.$"):
        asyncio.run(EngineGroup(engines).do(Wake()))
    assert [one.deeds for one in engines] == [[Wake()], [Wake()]]


def test_nothing_begins_while_one_is_away():
    engines = [Steady(), Steady()]
    engines[1].is_there = False
    with pytest.raises(BackendAway, match=r"replica 1 of 2 is not there, and nothing was changed; ask again\.$"):
        asyncio.run(EngineGroup(engines).do(Pause("abort")))
    assert [one.deeds for one in engines] == [[], []]


def test_one_that_cannot_go_back_is_told_of():
    engines = [Steady(), Steady()]
    engines[0].fails_back = StateError("'/old' is gone.")
    engines[1].fails = BackendAway("the engine was lost on the way. Ask again.")
    with pytest.raises(BackendAway, match=r"\(replica 1 of 2; replica 0 could not go back: '/old' is gone\.\)$"):
        asyncio.run(EngineGroup(engines).do(ChangeWeights("/new")))


def test_what_takes_memory_waits_for_what_is_undone_and_a_pause_does_not():
    async def run():
        engines = [Steady(), Steady()]
        engines[1].fails = StateError("no.")
        several = EngineGroup(engines)
        await asyncio.gather(
            several.do(ChangeWeights("/a")),
            several.do(ChangeWeights("/b")),
            several.do(Pause()),
            return_exceptions=True,
        )
        return [deed for deed in engines[0].deeds if deed != ("back", Pause())]

    a, b, pause = ChangeWeights("/a"), ChangeWeights("/b"), Pause()
    assert asyncio.run(run()) == [a, pause, ("back", a), b, ("back", b)]


def test_together_they_have_what_each_of_them_has():
    engines = [Steady(), Steady()]
    tone, other = AdapterInfo(name="tone", version="v1"), AdapterInfo(name="other", version="v2")
    engines[0].standing = EngineStatus(version="v", adapters=(tone, other))
    engines[1].standing = EngineStatus(version="v", adapters=(AdapterInfo(name="other", version="v3"), tone))
    assert EngineGroup(engines).standing.adapters == (tone,)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def server(tmp_path_factory, root):
    folder = model_folder.write_folder(tmp_path_factory.mktemp("model"), layers=2, width=32, heads=4, head_dim=8)
    serve = ServeConfig(compute="fp32", context_tokens=128, dp=2)
    replicas = replicas_of(folder, serve, device="cpu", name="small", forms=None, tell=lambda line: None)
    info = replicas.open()
    try:
        admin = Admin(key=KEY, folders=[root, folder], engine=replicas)
        with served(make_app(replicas, load_words(folder, info.vocab), admin=admin)) as at:
            server = Server(at.url)
            server.own = load_file(folder / FILE)
            server.folder = folder
            server.members = replicas._members
            yield server
    finally:
        replicas.close()


@pytest.fixture(scope="module")
def made(server, root):
    """Snapshots of other weights."""
    return [publish(root, {n: x * (1 + k / 10) for n, x in server.own.items()}, keep=9) for k in range(1, 4)]


def each(server, ask):
    """What some requests were answered at once, enough that both replicas have some."""
    found = []
    asking = [threading.Thread(target=lambda k=k: found.append((k, ask(k)))) for k in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    return [answer for _, answer in sorted(found, key=lambda one: one[0])]


def versions(server):
    """Of each replica."""
    return [one.info.version for one in server.members]


@pytest.mark.multiproc
def test_weights_and_adapters_reach_every_replica_or_none(server, made, root):
    before = server.admin("weights", method="GET").json()
    answer = server.admin("weights", {"path": made[0].path.name})
    assert (answer.json()["version"], versions(server)) == (made[0].version, [made[0].version] * 2)
    told = each(server, server.ask)
    assert {version for one in told for version in told_by(one)[2]} == {made[0].version}
    assert before["version"] != made[0].version

    linears = linears_of(from_hf_config(server.folder / "config.json"))
    for name, seed in (("a", 1), ("b", 2)):
        write_adapter(root / "adapters" / name, low_rank.random_adapter(seed, linears=linears))
    assert server.admin("adapters", {"name": "tone", "path": "adapters/a"}).status_code == 200
    assert [one.adapters for one in server.members] == [("tone",), ("tone",)]
    of_a = [told_by(one)[::2] for one in each(server, server.ask_adapter)]
    (version,) = {version for _, told in of_a for version in told}

    # One replica cannot read what the other can.
    server.members[1].do, real = _fails(StateError("it cannot be read here.")), server.members[1].do
    try:
        for path, body in (
            ("weights", {"path": made[1].path.name}),
            ("adapters", {"name": "tone", "path": "adapters/b"}),
        ):
            answer = server.admin(path, body)
            assert answer.status_code == 400
            assert "(replica 1 of 2; the others stay as they were)" in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "path"
        answer = server.admin("adapters", {"name": "new", "path": "adapters/b"})
        assert answer.status_code == 400
        assert server.admin("adapters/tone", method="DELETE").status_code == 400
    finally:
        server.members[1].do = real
    assert versions(server) == [made[0].version] * 2
    # Tokens and versions; log-probabilities have other last bits in other company.
    assert [told_by(one)[::2] for one in each(server, server.ask_adapter)] == of_a
    assert [one["name"] for one in server.admin("adapters", method="GET").json()["adapters"]] == ["tone"]
    assert [one.adapters for one in server.members] == [("tone",), ("tone",)]
    assert server.admin("adapters/tone", method="DELETE").json() == {"adapters": []}
    assert [one.adapters for one in server.members] == [(), ()]
    assert {one.status_code for one in each(server, server.ask_adapter)} == {404}
    assert version.startswith(f"{made[0].version}+")


def _fails(error):
    async def do(deed):
        raise error

    return do


@pytest.mark.multiproc
def test_pauses_sleep_and_abort_reach_every_replica(server, made):
    alone = [told_by(one)[0] for one in each(server, server.ask)]
    assert server.admin("pause?mode=keep").json()["state"] == "paused"
    assert [one.health().state for one in server.members] == ["paused", "paused"]
    assert server.health() == (503, "paused")
    found = []
    asking = threading.Thread(target=lambda: found.extend(each(server, server.ask)))
    asking.start()
    asking.join(0.5)
    assert not found
    counted = [one.counters() for one in server.members]
    assert server.admin("resume").json()["state"] == "serving"
    asking.join(60)
    assert [told_by(one)[0] for one in found] == alone
    assert all(count.running == 0 for count in counted)

    server.members[1].do, real = _fails(BackendAway("lost on the way. Ask again.")), server.members[1].do
    for path in ("pause?mode=wait", "sleep"):
        assert server.admin(path).status_code == 503
        assert [one.health().state for one in server.members] == ["ready", "ready"]
    server.members[1].do = real
    assert server.admin("sleep").json()["state"] == "asleep"
    assert [one.health().state for one in server.members] == ["asleep", "asleep"]
    assert {one.status_code for one in each(server, server.ask)} == {503}
    # One that cannot wake keeps the others asleep; asked again, all wake.
    server.members[0].do, real = _fails(BackendAway("lost on the way. Ask again.")), server.members[0].do
    refused = server.admin("wake", {"path": made[2].path.name})
    server.members[0].do = real
    assert (refused.status_code, "replica 0 of 2" in refused.text) == (503, True)
    assert [one.health().state for one in server.members] == ["asleep", "asleep"]
    assert server.admin("wake", {"path": made[2].path.name}).json()["state"] == "serving"
    assert versions(server) == [made[2].version] * 2
    assert {version for one in each(server, server.ask) for version in told_by(one)[2]} == {made[2].version}

    # Answers that are held on both are taken back on both.
    server.admin("pause?mode=keep")
    ends = []
    asking = threading.Thread(target=lambda: ends.extend(each(server, server.ask)))
    asking.start()
    server.wait_for(lambda: all(len(one._mail) == 3 for one in server.members))
    assert server.admin("abort").json() == {"aborted": 6}
    asking.join(60)
    assert [one.json()["answers"][0]["finish"] for one in ends] == ["abort"] * 6
    server.admin("resume")
    assert server.health() == (200, "ready")


@pytest.mark.multiproc
def test_while_a_replica_is_away_nothing_changes_and_back_it_is_as_the_others(server, made, monkeypatch):
    monkeypatch.setattr("superstep.serve.processes.engine_client.AGAIN_S", (1.0,))  # away for long enough to be asked
    before = versions(server)
    target = made[0] if before[0] == made[2].version else made[2]
    rank = ranks_below(psutil.Process())[-1]  # those of other tests were started before
    rank.kill()
    server.wait_for(lambda: not all(one.is_there for one in server.members))
    for path, body in (("weights", {"path": target.path.name}), ("pause", None), ("sleep", None)):
        refused = server.admin(path, body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "is not there, and nothing was changed; ask again." in refused.json()["error"]["message"]
    assert {one.status_code for one in each(server, server.ask)} == {200}
    server.wait_for(lambda: server.health() == (200, "ready"))
    assert versions(server) == before
    assert server.admin("weights", {"path": target.path.name}).json()["version"] == target.version
    assert versions(server) == [target.version] * 2
