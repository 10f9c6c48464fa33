"""A crowd on a real server: every request is answered or refused with a time to come again, and pages come back.

Half of the clients vanish in the middle of their answers. The server has two replicas; at the end one is killed.
"""

import asyncio
import json
import random
import time

import httpx
import pytest
from test_serve_verb import Server

import model_folder

pytestmark = pytest.mark.multiproc

CONTEXT = 96


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = model_folder.write_folder(tmp_path_factory.mktemp("model"), width=32, heads=4, kv_heads=2, ffn=64)
    flags = ["--numerics.compute", "fp32", "--serve.kernels", "off", "--serve.context-tokens", str(CONTEXT)]
    made = Server(folder, *flags, "--serve.requests", "16", "--grace-s", "2", "--serve.pages", "64", "--plan.dp", "2")
    yield made
    made.end()
    assert "Traceback" not in made.said


def sampling(tokens, seed):
    return {"max_tokens": tokens, "seed": seed, "ignore_eos": True}


async def one(client, url, number):
    """What became of a client: the tokens of its answer, 429, or that it left."""
    draw = random.Random(number)
    prompt = [draw.randrange(1, 300) for _ in range(draw.randint(1, 40))]
    wanted = draw.randint(1, 40)
    body = {"prompt": prompt, "stream": True, "sampling": sampling(wanted, number)}
    leaves = draw.randint(1, wanted) if number % 2 else None
    began, got = time.monotonic(), 0
    async with client.stream("POST", f"{url}/generate", json=body) as response:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            return "refused", 0.0
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            got += len(json.loads(line).get("tokens", ()))
            if leaves is not None and got >= leaves:
                return "left", time.monotonic() - began
    assert got == wanted, f"client {number} was told {got} of {wanted} tokens"
    return "answered", time.monotonic() - began


def crowd(server, clients):
    async def run():
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*[one(client, server.url, number) for number in range(clients)])

    return asyncio.run(run())


def is_idle(server):
    """Nobody runs or waits, and no page is in use: free and cached ones are all."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return [server.number(name) for name in names] == [0, 0, 0]


@pytest.mark.parametrize(
    "clients", [20, pytest.param(50, marks=pytest.mark.long), pytest.param(500, marks=pytest.mark.slow)]
)
def test_everybody_is_answered_and_no_page_is_lost(server, clients):
    told = crowd(server, clients)
    ends = [end for end, _ in told]
    assert ends.count("answered") + ends.count("refused") == clients // 2
    assert ends.count("left") == clients // 2
    assert ends.count("refused") == 0 if clients < 1024 else ends.count("answered") > 0
    # Nobody waits for longer than the whole crowd takes; the last are served as well as the first.
    longest = max(seconds for _, seconds in told)
    assert longest < 60
    server.wait_for(lambda: is_idle(server), seconds=10)


def test_a_replica_that_is_killed_is_told_of_and_the_other_answers(server):
    killed, *_ = server.ranks()
    killed.kill()
    # It may be back before anybody asks how many are ready.
    server.wait_for(lambda: "fault: rank 0: the process was killed" in server.said, seconds=10)
    assert httpx.get(f"{server.url}/health").status_code == 200
    body = {"prompt": [1, 2, 3], "sampling": sampling(4, 1)}
    for _ in range(3):
        assert len(httpx.post(f"{server.url}/generate", json=body).json()["answers"][0]["tokens"]) == 4
    server.wait_for(lambda: len(server.ranks()) == 2, seconds=60)
    server.wait_for(lambda: httpx.get(f"{server.url}/health").json()["status"] == "ready", seconds=60)
    assert crowd(server, 8)
