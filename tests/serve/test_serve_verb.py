"""superstep serve as its clients meet it: the official client, crowds, those who leave, and a rank that is killed."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import psutil
import pytest
import torch

import model_folder
from ranks import ranks_below
from superstep.model.files.peft_adapter import Adapter, LoraFactors, linears_of, write_adapter
from superstep.plan.model.hf_config import from_hf_config

pytestmark = pytest.mark.multiproc

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["x", "y"]}},
    "required": ["n", "of"],
    "additionalProperties": False,
}


class Server:
    """The command in a process of its own."""

    def __init__(self, folder, *flags):
        command = [sys.executable, "-m", "superstep", "serve", str(folder), "--port", "0", "--name", "small", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if found := re.search(r"http://127.0.0.1:(\d+) ", line):
                self.url = f"http://127.0.0.1:{found[1]}"
                break
        else:
            raise AssertionError(self.said)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self):
        for line in self.process.stdout:
            self.said += line

    def client(self, cls=openai.OpenAI):
        return cls(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ranks(self):
        return ranks_below(psutil.Process(self.process.pid))

    def number(self, name):
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)", text, re.MULTILINE)[1])

    def wait_for(self, is_so, seconds=30):
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def end(self, number=signal.SIGINT):
        family = psutil.Process(self.process.pid).children(recursive=True)
        os.kill(self.process.pid, number)
        status = self.process.wait(20)
        assert not psutil.wait_procs(family, timeout=5)[1]
        return status


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One that answers with the bits of training, of many short contexts, some of their tokens guessed."""
    folder = model_folder.write_folder(tmp_path_factory.mktemp("model"))
    adapters = tmp_path_factory.mktemp("adapters")
    linears = linears_of(from_hf_config(folder / "config.json"))
    torch.manual_seed(0)
    for name in ("calm", "terse"):
        parts = {n: LoraFactors(torch.randn(2, i) * 0.2, torch.randn(o, 2) * 0.2, 2.0) for n, (o, i) in linears.items()}
        write_adapter(adapters / name, Adapter(parts=parts))
    flags = ["--numerics.exact", "true", "--numerics.compute", "fp32", "--serve.context-tokens", "128"]
    flags += ["--serve.adapters", str(adapters)]
    flags += ["--serve.speculate", "ngram", "--serve.draft-tokens", "3"]
    made = Server(folder, *flags)
    yield made
    if made.process.poll() is None:
        made.end()


def ask(client, prompt, **fields):
    return client.completions.create(**{"model": "small", "prompt": prompt, "max_tokens": 16, "seed": 5} | fields)


def test_the_official_client_is_answered(server):
    client = server.client()
    assert [model.id for model in client.models.list().data] == ["small", "calm", "terse"]
    answer = ask(client, "To be", n=2, logprobs=2)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].text != answer.choices[1].text
    assert len(answer.choices[0].logprobs.tokens) == 16
    assert answer.usage.completion_tokens == 32
    said = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "To be?"}], max_tokens=12, seed=1
    )
    assert said.choices[0].message.role == "assistant"


def test_an_adapter_is_asked_for_as_a_model(server):
    client = server.client()
    texts = {name: ask(client, "To be", model=name).choices[0].text for name in ("small", "calm", "terse")}
    assert len(set(texts.values())) == 3
    assert client.models.retrieve("calm").parent == "small"
    with pytest.raises(openai.NotFoundError, match=r"model = 'clam' is not served here; did you mean 'calm'"):
        ask(client, "To be", model="clam")
    body = {"prompt": [1, 2, 3], "sampling": {"max_tokens": 2, "ignore_eos": True}}
    answer, plain = (
        httpx.post(f"{server.url}/generate", json=body | {"adapter": name}).json()["answers"][0]
        for name in ("terse", None)
    )
    assert answer["versions"][0].startswith(plain["versions"][0] + "+")
    assert httpx.post(f"{server.url}/generate", json=body | {"adapter": "clam"}).status_code == 404


def test_streamed_pieces_joined_are_the_whole(server):
    client = server.client()
    for seed in range(5):
        whole = ask(client, "Ümläute", seed=seed, max_tokens=40).choices[0].text
        pieces = [event.choices[0].text for event in ask(client, "Ümläute", seed=seed, max_tokens=40, stream=True)]
        assert "".join(pieces) == whole
        assert len(pieces) > 5


def test_an_answer_does_not_depend_on_who_else_asks(server):
    """Alone, then with forty others at once, then with its prompt in the cache: the same tokens and their chances."""
    body = {"prompt": list(range(3, 60)), "max_tokens": 30, "seed": 11}

    def told(answer):
        return [(token["token"], token["logprob"]) for token in answer["tokens"]] if "tokens" in answer else answer

    alone = told(httpx.post(f"{server.url}/generate", json=body).json())

    async def crowd():
        async with httpx.AsyncClient(timeout=60) as client:
            others = [{"prompt": [k + 1] * (k + 1), "max_tokens": 20, "seed": k} for k in range(40)]
            posts = [client.post(f"{server.url}/generate", json=each) for each in (*others, body)]
            return (await asyncio.gather(*posts))[-1].json()

    assert told(asyncio.run(crowd())) == alone
    assert told(httpx.post(f"{server.url}/generate", json=body).json()) == alone


def test_an_answer_of_a_schema_parses(server):
    client = server.client()
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "a pair"}],
            response_format=form,
            max_tokens=100,
            seed=seed,
            temperature=0.5,
        )
        if answer.choices[0].finish_reason == "stop":
            value = json.loads(answer.choices[0].message.content)
            assert value.keys() == {"n", "of"}
            assert 0 <= value["n"] <= 99
            assert value["of"] in ("x", "y")
        else:
            assert answer.choices[0].message.content.lstrip().startswith("{")


def test_an_answer_of_a_schema_that_max_tokens_cuts_is_a_beginning_that_does_not_parse(server):
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
    body = {"model": "small", "messages": [{"role": "user", "content": "a pair"}], "response_format": form, "seed": 1}
    (choice,) = server.client().chat.completions.create(**body, max_tokens=3).choices
    assert choice.finish_reason == "length"
    assert choice.message.content
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content)


def test_half_of_a_crowd_leaves_and_the_others_are_answered(server):
    async def crowd():
        client = server.client(openai.AsyncOpenAI)

        async def stay(k):
            answer = await client.completions.create(model="small", prompt=[k + 1] * 5, max_tokens=20, seed=k)
            return answer.usage.completion_tokens

        async def leave(k):
            stream = await client.completions.create(model="small", prompt=[k + 1] * 9, max_tokens=100, stream=True)
            async for _ in stream:
                break
            await stream.close()

        done = await asyncio.gather(*[stay(k) if k % 2 else leave(k) for k in range(100)])
        return [tokens for tokens in done if tokens is not None]

    assert asyncio.run(crowd()) == [20] * 50
    server.wait_for(
        lambda: server.number("vllm:num_requests_running") == server.number("vllm:num_requests_waiting") == 0
    )
    assert server.number("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", {"model": "small", "prompt": ""}, 400, "prompt is empty"),
        ("/v1/completions", {"model": "small", "prompt": [9999]}, 400, "token 9999"),
        ("/v1/completions", {"model": "small", "prompt": [1] * 500}, 400, "128"),
        ("/v1/completions", {"model": "small", "prompt": "x", "n": 0}, 400, "n = 0"),
        ("/v1/completions", {"model": "small", "prompt": "x", "sugar": 1}, 400, "sugar"),
        ("/v1/completions", {"model": "big", "prompt": "x"}, 404, "big"),
        ("/generate", {"prompt": [1], "temperature": -1}, 400, "temperature"),
        ("/nowhere", {}, 404, "/nowhere"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(server, path, body, status, said):
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_guesses_are_counted(server):
    drafted, accepted = (f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
    before = server.number(drafted), server.number(accepted)
    # Guesses of one token, which is likelier than all others together, stand; they are the text's own.
    answer = ask(server.client(), [7] * 9, max_tokens=20, logit_bias={"7": 100})
    assert answer.usage.completion_tokens == 20
    assert server.number(drafted) - before[0] == server.number(accepted) - before[1] >= 12


def test_a_killed_rank_is_told_at_once_and_comes_back(server):
    before = ask(server.client(), "To be", max_tokens=20).choices[0].text
    (rank,) = server.ranks()
    told = {}

    def wait():
        try:
            ask(server.client(), "To be", max_tokens=120)
        except openai.APIStatusError as error:
            told["status"], told["at"] = error.status_code, time.monotonic()

    asking = threading.Thread(target=wait)
    asking.start()
    server.wait_for(lambda: server.number("vllm:num_requests_running") > 0 or not asking.is_alive())
    rank.kill()
    killed = time.monotonic()
    asking.join(10)
    if told:  # unless it had been answered before
        assert told["status"] == 503
        assert told["at"] - killed < 5
    server.wait_for(lambda: any(each.pid != rank.pid for each in server.ranks()), seconds=60)
    server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, seconds=60)
    assert ask(server.client(), "To be", max_tokens=20).choices[0].text == before


@pytest.mark.long
def test_a_server_of_several_ranks_that_is_told_to_end_leaves_nobody(tmp_path):
    made = Server(model_folder.write_folder(tmp_path / "model"), "--plan.tp", "2")
    assert len(made.ranks()) == 2
    assert made.end(signal.SIGTERM) in (0, 143)
    assert "Traceback" not in made.said


def test_a_server_that_is_told_to_end_leaves_nobody(server):
    """The one that all the tests above have asked."""
    assert len(server.ranks()) == 1
    assert server.end(signal.SIGTERM) in (0, 143)
    assert "Traceback" not in server.said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere"], "'nowhere' is not there"),
        ([], "no model is given"),
        (["."], "holds no config.json"),
        ([".", "--port", "99999"], "--port = 99999 must be from 0 to 65535"),
        ([".", "--serve.requests", "0"], "serve.requests = 0 must be at least 1"),
        ([".", "--serve.adapters", "nowhere"], "serve.adapters names 'nowhere'"),
        ([".", "--serve.quantise", "1"], "unknown"),
        ([".", "--serve.draft-tokens", "0"], "serve.draft_tokens = 0 must be at least 1"),
        ([".", "--serve.read-timeout-s", "0"], "serve.read_timeout_s = 0.0 must be above 0 and at most 240"),
        ([".", "--serve.speculate", "nowhere"], "'nowhere' is not there"),
    ],
)
def test_a_mistake_is_one_line(argv, said, tmp_path, monkeypatch, capsys):
    from superstep.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["serve", *argv]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
