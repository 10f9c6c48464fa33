"""News between the ranks and the event loop: how often somebody is woken for it."""

import asyncio
import time
import types
from multiprocessing.connection import Client

import pytest

from superstep.errors import ConfigError
from superstep.serve.config import ServeConfig
from superstep.serve.processes.engine_client import EngineClient
from superstep.serve.processes.output_queue import OutputListener, OutputQueue
from superstep.serve.scheduling.engine_messages import (
    ORDERS,
    REPORTS,
    AbortRequests,
    AddRequest,
    EndEngine,
    Ready,
    RequestRefused,
    StepOutput,
)
from superstep.serve.scheduling.request import Counters, ModelInfo, RequestUpdate, Sampling, TokenOutput

INFO = ModelInfo(name="small", vocab=300, context_tokens=4096, version="v", end_of_text=(0,))
STEPS, REQUESTS = 20, 8


def ranks(taken_back):
    """A rank that answers once all have asked: a token of each in each step, the last of which ends them."""

    def run(kind, worlds, first, cut):
        _, _, address, *_ = worlds[0].args
        with Client(address) as pipe:
            pipe.send_bytes(REPORTS.encode(Ready(INFO)))
            asked = []
            while True:
                match ORDERS.decode(pipe.recv_bytes()):
                    case AddRequest(request) if len(request.prompt) > 1:
                        pipe.send_bytes(REPORTS.encode(RequestRefused(request.id, "prompt is too long.")))
                    case AddRequest(request):
                        asked.append(request.id)
                    case AbortRequests(requests):
                        taken_back.extend(requests)
                    case EndEngine():
                        return
                if len(asked) < REQUESTS:
                    continue
                for step in range(STEPS):
                    finish = "length" if step == STEPS - 1 else None
                    told = [
                        RequestUpdate(request=n, tokens=(TokenOutput(token=step, logprob=0.0),), finish=finish)
                        for n in asked
                    ]
                    pipe.send_bytes(REPORTS.encode(StepOutput(tuple(told), Counters())))
                    time.sleep(0.002)
                asked = []

    return run


@pytest.fixture
def host(tmp_path, monkeypatch):
    taken_back = []
    monkeypatch.setattr("superstep.serve.processes.engine_client.launch_parties", ranks(taken_back))
    made = EngineClient(tmp_path, ServeConfig())
    made.taken_back = taken_back
    made.open()
    yield made
    made.close()


async def streamed(host):
    return [told.token async for news in host.stream((1,), Sampling()) for told in news.tokens]


async def heard(host, enough=STEPS):
    tokens = []

    def hear(news):
        tokens.extend(told.token for told in news.tokens)
        return len(tokens) >= enough

    await host.hear((1,), Sampling(), hear)
    return tokens


@types.coroutine
def counting(work, waits):
    """What some work returns; each time that it waits is noted."""
    while True:
        try:
            waited_for = work.send(None)
        except StopIteration as end:
            return end.value
        waits.append(waited_for)
        yield waited_for


@pytest.mark.parametrize("ask", [streamed, heard])
def test_a_step_wakes_the_event_loop_once_for_all_its_news(host, ask):
    async def run():
        loop, wakes = asyncio.get_running_loop(), []
        real = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (wakes.append(args), real(*args))
        return await asyncio.gather(*[ask(host) for _ in range(REQUESTS)]), len(wakes)

    told, wakes = asyncio.run(run())
    assert told == [list(range(STEPS))] * REQUESTS
    assert wakes <= STEPS + 1


def test_who_only_keeps_the_news_is_woken_at_the_end_alone(host):
    waits = [[] for _ in range(REQUESTS)]

    async def run(ask):
        for one in waits:
            one.clear()
        return await asyncio.gather(*[counting(ask(host), one) for one in waits])

    assert asyncio.run(run(heard)) == [list(range(STEPS))] * REQUESTS
    assert [len(one) for one in waits] == [1] * REQUESTS
    asyncio.run(run(streamed))
    assert all(len(one) > 1 for one in waits)


def test_who_has_heard_enough_takes_the_request_back(host):
    async def run():
        return await asyncio.gather(heard(host, enough=3), *[heard(host) for _ in range(REQUESTS - 1)])

    assert [len(tokens) for tokens in asyncio.run(run())] == [3] + [STEPS] * (REQUESTS - 1)
    host.close()
    assert host.taken_back == [1]


def test_a_refusal_reaches_who_hears_and_who_reads(host):
    async def run():
        with pytest.raises(ConfigError, match="too long"):
            await host.hear((1, 2), Sampling(), lambda news: False)
        with pytest.raises(ConfigError, match="too long"):
            await anext(host.stream((1, 2), Sampling()))

    asyncio.run(run())
    assert host.taken_back == []


def test_an_ear_that_fails_says_so_and_hears_no_more():
    async def run():
        def fails(news):
            raise ValueError("a bug")

        ear, box = OutputListener(fails), OutputQueue()
        for mail in (ear, box):
            mail.put(RequestUpdate(request=1))
            mail.put(RequestUpdate(request=1, finish="stop"))
        with pytest.raises(ValueError, match="a bug"):
            await ear.end
        assert not ear.is_over
        assert [(await box.get()).finish, (await box.get()).finish] == [None, "stop"]
        assert box.is_over

    asyncio.run(run())
