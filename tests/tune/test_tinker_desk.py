"""The desk: requests in order, each once, whatever the ones before came to; and the store's paths."""

import os
import threading
from concurrent.futures import wait

import pytest

from superstep.comm.device import Device
from superstep.errors import ConfigError, DataError, Fault, StateError
from superstep.tune.tinker import futures as desks
from superstep.tune.tinker import service as services
from superstep.tune.tinker.config import TinkerConfig
from superstep.tune.tinker.futures import QueueFull, RequestFailed, RequestQueue, Result
from superstep.tune.tinker.saved_models import ABOUT, About, SavedModels, SavedPath, place_of

ABOUT_TEXT = About(
    base="b", version="v", rank=1, alpha=1.0, train_mlp=True, train_attn=True, train_unembed=True, seed=0, step=3
).text


class Busy:
    """A sampler that answers after some steps."""

    def __init__(self):
        self.waiting = []
        self.steps = 0

    @property
    def is_idle(self):
        return not self.waiting

    def step(self):
        self.steps += 1
        if self.steps % 5 == 0:
            self.waiting.pop(0)(Result(b"drawn"))


@pytest.fixture
def desk():
    told = []
    made = RequestQueue(Busy(), told.append)
    made.told, made.sampler = told, made._sampler
    yield made
    made.close()
    assert not made._thread.is_alive()


def outcome(desk, name):
    return desk.future(name).result(timeout=30)


def test_requests_are_done_in_order_and_once(desk):
    done, gate = [], threading.Event()

    def job(number):
        def work(reply):
            assert gate.wait(30)
            done.append(number)
            reply(Result(b"%d" % number))

        return work

    for number in (1, 2, 3, 2, 1):
        desk.submit(f"r{number}", job(number))
    gate.set()
    assert [outcome(desk, f"r{number}") for number in (3, 2, 1)] == [Result(b"3"), Result(b"2"), Result(b"1")]
    desk.submit("r2", job(2))
    desk.submit("r4", job(4))
    outcome(desk, "r4")
    assert done == [1, 2, 3, 4]
    assert desk.future("r5") is None


def test_whatever_a_request_comes_to_the_next_is_served(desk):
    def raises(error):
        def work(reply):
            raise error

        return work

    desk.submit("user", raises(DataError("data is empty.")))
    desk.submit("ours", raises(KeyError("x\ny")))
    desk.submit("good", lambda reply: reply(Result(b"{}")))
    assert outcome(desk, "good") == Result(b"{}")
    assert outcome(desk, "user") == RequestFailed("data is empty.", is_users=True)
    ours = outcome(desk, "ours")
    assert not ours.is_users
    assert ours.message.startswith("KeyError")
    assert len(desk.told) == 1  # a client's mistake is no news to who runs the server
    assert "Traceback" in desk.told[0]


def test_answers_are_drawn_between_other_requests(desk):
    for number in range(2):
        desk.submit(f"s{number}", desk.sampler.waiting.append)
    desk.submit("training", lambda reply: reply(Result(b"{}")))
    wait([desk.future(name) for name in ("s0", "s1", "training")], timeout=30)
    assert [outcome(desk, name).body for name in ("s0", "s1", "training")] == [b"drawn", b"drawn", b"{}"]


def test_results_of_long_ago_go(desk, monkeypatch):
    monkeypatch.setattr(desks, "KEPT", 3)
    for number in range(6):
        desk.submit(f"r{number}", lambda reply: reply(Result(b"{}")))
        outcome(desk, f"r{number}")
        desk.note_fetched(f"r{number}")
        desk.note_fetched(f"r{number}")
    assert [desk.future(f"r{number}") is not None for number in range(6)] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("bound", ["MOST_WAITING", "MOST_WAITING_BYTES"])
def test_what_waits_is_bounded_until_it_is_done(desk, monkeypatch, bound):
    gate = threading.Event()
    monkeypatch.setattr(desks, bound, {"MOST_WAITING": 2, "MOST_WAITING_BYTES": 25}[bound])

    def job(reply):
        assert gate.wait(30)
        reply(Result(b"{}"))

    desk.submit("r0", job, size_bytes=10)
    desk.submit("r1", job, size_bytes=10)
    with pytest.raises(QueueFull, match="2 requests of 20 bytes wait already"):
        desk.submit("r2", job, size_bytes=10)
    assert desk.future("r2") is None
    desk.submit("r1", job, size_bytes=10)  # comes again: is no other one
    gate.set()
    outcome(desk, "r1")
    desk.submit("r2", job, size_bytes=10)
    assert outcome(desk, "r2") == Result(b"{}")


@pytest.mark.parametrize(("bound", "value"), [("MOST_LEFT", 2), ("LEFT_S", 0.0)])
def test_results_that_nobody_fetches_go(desk, monkeypatch, bound, value):
    monkeypatch.setattr(desks, bound, value)
    for number in range(5):
        desk.submit(f"r{number}", lambda reply: reply(Result(b"{}")))
        outcome(desk, f"r{number}")
    desk.note_fetched("r4")
    desk.submit("last", lambda reply: reply(Result(b"{}")))
    there = [desk.future(f"r{number}") is not None for number in range(5)]
    assert there == [False, False, bound == "MOST_LEFT", bound == "MOST_LEFT", True]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://a/weights",
        "tinker://a/b/c",
        "tinker://a/weights/..",
        "tinker://../weights/a",
        "tinker://a/weights/b/c",
        "tinker://a/weights/.hidden",
        "a/weights/b",
        "tinker://a\n/weights/b",
    ],
)
def test_no_path_leads_out_of_the_store(path):
    with pytest.raises(ConfigError, match="is none of tinker://MODEL"):
        place_of(path)


def test_what_is_saved_is_seen_whole_or_not_at_all(tmp_path):
    store = SavedModels(tmp_path)
    place = SavedPath("m:train:0", "weights", "a")
    assert place_of(place.path) == place

    def save(text, **how):
        with store.saving(place, **how) as folder:
            (folder / ABOUT).write_text(text)

    def breaks(**how):
        with store.saving(place, **how) as folder:
            (folder / "half").write_text("x")
            raise OSError(28, os.strerror(28))

    with pytest.raises(Fault, match="cannot be written: No space left"):
        breaks()
    assert list(store.list_saved("m:train:0")) == []
    with pytest.raises(StateError, match="is not there"):
        store.find(place.path, "weights")
    save(ABOUT_TEXT)
    assert store.find(place.path, "weights")[1].step == 3
    with pytest.raises(ConfigError, match="name = 'a' is taken"):
        save(ABOUT_TEXT)
    with pytest.raises(Fault, match="cannot be written"):
        breaks(overwrite=True)
    assert store.find(place.path, "weights")[1].step == 3
    save(ABOUT_TEXT.replace("3", "4"), overwrite=True)
    assert store.find(place.path, "weights")[1].step == 4
    with pytest.raises(ConfigError, match="is what save_state gave; give what save_weights_for_sampler gave"):
        store.find(place.path, "sampler_weights")
    (told,) = store.list_saved("m:train:0")
    assert (told["tinker_path"], told["checkpoint_id"]) == (place.path, "weights/a")
    assert sorted(path.name for path in (tmp_path / "m:train:0" / "weights").iterdir()) == ["a"]
    store.delete(place)
    assert list(store.list_saved("m:train:0")) == []


def test_a_session_has_so_many_samplers_and_the_oldest_go_first(monkeypatch, tmp_path):
    monkeypatch.setattr(services, "MOST_SAMPLERS", 3)
    config = TinkerConfig(folder=tmp_path, name="base", root=tmp_path)
    service = services.TinkerService(config, Busy(), SavedModels(tmp_path), Device("cpu"))
    try:
        session, other = service.create_session(), service.create_session()
        named = [service._add_sampler(session, number, f"tinker://{number}") for number in (1, 2, 3, 3, 4, 5)]
        kept = service._add_sampler(other, 1, None)
        for name in named[:2]:
            with pytest.raises(services.UnknownError, match="is not known; it has ended"):
                service.sampler(name)
        assert [service.sampler(name)["model_path"] for name in named[2:]] == [f"tinker://{k}" for k in (3, 3, 4, 5)]
        assert service.sampler(kept)["model_path"] is None, "another client's stay"
    finally:
        service.desk.close()
