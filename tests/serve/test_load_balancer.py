"""Several engines behind one interface: who is chosen, what is summed, what becomes of the others when one is lost."""

import asyncio
import os
import threading

import pytest

from scripted import Scripted
from superstep.errors import ConfigError, Fault
from superstep.serve.api.backend import BackendAway, Health
from superstep.serve.config import ServeConfig
from superstep.serve.processes.engine_client import EngineClient
from superstep.serve.processes.load_balancer import LoadBalancer
from superstep.serve.scheduling.engine_messages import Ready, StepOutput
from superstep.serve.scheduling.request import Counters, ModelInfo, Sampling

INFO = ModelInfo(name="small", vocab=300, context_tokens=4096, version="v", end_of_text=(0,))


class Member(Scripted):
    """A scripted engine that is opened and closed."""

    fails = None
    is_open = False

    def begin(self):
        pass

    def open(self):
        if self.fails is not None:
            raise self.fails
        self.is_open = True
        return self.info

    def close(self):
        self.is_open = False

    def counters(self):
        return Counters(running=self.live, pages=10, used_pages=self.live)


def members(count=2):
    return [Member(INFO, lambda request: [5] * 50) for _ in range(count)]


async def answered(replicas, prompt, *, tokens=4, salt=""):
    stream = replicas.stream(tuple(prompt), Sampling(max_tokens=tokens), salt=salt)
    return [told.token async for news in stream for told in news.tokens]


def taken(made):
    return [len(one.asked) for one in made]


def test_requests_go_where_the_fewest_tokens_are_left():
    async def run():
        made = members(3)
        for one in made:
            one.gate = asyncio.Event()
        replicas = LoadBalancer(made)
        sizes = [300, 40, 40, 10, 10, 10, 10]
        waiting = []
        for number, size in enumerate(sizes):
            waiting.append(asyncio.create_task(answered(replicas, [number + 1] * size, tokens=10)))
            await asyncio.sleep(0.01)
        assert taken(made) == [1, 3, 3]
        assert replicas.counters() == Counters(running=7, pages=30, used_pages=7)
        for one in made:
            one.gate.set()
        assert await asyncio.gather(*waiting) == [[5] * 10] * len(sizes)
        assert replicas._left == [0, 0, 0]

    asyncio.run(run())


def test_a_prompt_goes_where_its_beginning_was_unless_too_much_waits_there():
    async def run():
        made = members()
        replicas = LoadBalancer(made)
        talk = list(range(1, 200))
        await answered(replicas, [9] * 100)  # the first replica
        first = taken(made)
        made[0].gate = asyncio.Event()
        other = asyncio.create_task(answered(replicas, [7] * 30, tokens=5))
        await asyncio.sleep(0.01)
        await answered(replicas, talk)  # so that this one is the second's
        made[0].gate.set()
        await other
        for turn in range(3):
            await answered(replicas, [*talk, *[3] * 20 * turn])
        assert first == [1, 0]
        assert taken(made) == [2, 4]
        await answered(replicas, talk, salt="mine")  # shares no pages
        assert taken(made) == [3, 4]
        made[1].gate = asyncio.Event()
        many = asyncio.create_task(answered(replicas, talk, tokens=400))
        await asyncio.sleep(0.01)
        await answered(replicas, talk)
        assert taken(made) == [4, 5]
        made[1].gate.set()
        await many

    asyncio.run(run())


def test_one_that_is_lost_takes_its_own_streams_along_and_no_other():
    async def run():
        made = members()
        made[0].fails_after = 2
        replicas = LoadBalancer(made)
        lost, kept = await asyncio.gather(
            answered(replicas, [1] * 9), answered(replicas, [2] * 9), return_exceptions=True
        )
        assert isinstance(lost, BackendAway)
        assert kept == [5] * 4
        made[0].is_ready = False
        health = replicas.health()
        assert health.is_ready
        assert health.state.startswith("1 of 2 ready")
        for number in range(3):
            await answered(replicas, [number] * 9)
        assert taken(made) == [1, 4]
        made[1].is_ready = False
        assert not replicas.health().is_ready
        assert replicas._left == [0, 0]

    asyncio.run(run())


def test_whose_weights_are_others_is_seen():
    """A folder that was written over is read anew by the ranks that are started again, and by no others."""
    made = members()
    replicas = LoadBalancer(made)
    assert replicas.health().state == "ready"
    made[1].info = ModelInfo(name="small", vocab=300, context_tokens=4096, version="w", end_of_text=(0,))
    assert replicas.health() == Health(is_ready=True, state="ready, weights ['v', 'w']")


def test_who_leaves_early_is_counted_off():
    async def run():
        replicas = LoadBalancer(members())
        stream = replicas.stream((1,) * 50, Sampling(max_tokens=100))
        async for _ in stream:
            break
        assert sum(replicas._left) == 100 - 1
        await stream.aclose()
        assert replicas._left == [0, 0]

    asyncio.run(run())


def test_a_host_that_is_told_to_end_while_it_starts_ends(tmp_path, monkeypatch):
    """Nobody is there yet to take the order to leave."""

    def ranks(kind, worlds, first, cut):
        starting.set()
        cut.poll(60)

    starting = threading.Event()
    monkeypatch.setattr("superstep.serve.processes.engine_client.launch_parties", ranks)
    host = EngineClient(tmp_path, ServeConfig())
    host.begin()
    assert starting.wait(60)
    host.close()
    with pytest.raises(Fault, match="closed before it could answer"):
        host.open()


def _hang(world, folder, *rest):
    """What a rank does whose weights lie on a mount that does not answer."""
    os.mkfifo(folder / "weights")
    os.open(folder / "weights", os.O_RDONLY)


@pytest.mark.multiproc
def test_ranks_that_hang_over_their_weights_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("superstep.serve.processes.engine_client.serve_rank", _hang)
    host = EngineClient(tmp_path, ServeConfig())
    host.begin()
    while not (tmp_path / "weights").exists():
        assert host._keeper.is_alive()
    host.close()
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads
        os.open(tmp_path / "weights", os.O_WRONLY | os.O_NONBLOCK)


def test_replicas_that_are_loading_keep_nobody_who_is_told_to_end(tmp_path, monkeypatch):
    """SIGTERM is an exception in the thread that waits for them."""

    def interrupted(self):
        raise SystemExit(143)

    monkeypatch.setattr(
        "superstep.serve.processes.engine_client.launch_parties", lambda kind, worlds, first, cut: cut.poll(60)
    )
    monkeypatch.setattr(EngineClient, "open", interrupted)
    made = [EngineClient(tmp_path, ServeConfig()) for _ in range(2)]
    replicas = LoadBalancer(made)
    with pytest.raises(SystemExit):
        replicas.open()
    assert all(one._keeper.is_alive() for one in made)
    replicas.close()
    assert not any(one._keeper.is_alive() for one in made)


def test_an_engine_that_has_requests_and_makes_no_step_is_not_ready(tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr("superstep.serve.processes.engine_client.time.monotonic", lambda: now_s[0])
    host = EngineClient(tmp_path, ServeConfig())
    host._hear(Ready(INFO))

    async def ask():
        now_s[0] += 500  # without a request there is no step to be made
        assert host.health() == Health(is_ready=True, state="ready")
        asked = asyncio.ensure_future(host.hear((1,), Sampling(), lambda news: False))
        await asyncio.sleep(0)
        now_s[0] += 50
        host._hear(StepOutput((), Counters()))
        now_s[0] += 50
        assert host.health().is_ready
        now_s[0] += 50
        assert host.health() == Health(is_ready=False, state="stalled")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert host.health().is_ready

    asyncio.run(ask())


def test_none_stays_open_where_one_cannot_be_opened():
    made = members()
    made[1].fails = ConfigError("no.")
    with pytest.raises(ConfigError, match=r"no\."):
        LoadBalancer(made).open()
    assert not made[0].is_open
    made[1].fails = None
    replicas = LoadBalancer(made)
    assert replicas.open() == INFO
    assert replicas.adapters == []
    replicas.close()
    assert not made[0].is_open
