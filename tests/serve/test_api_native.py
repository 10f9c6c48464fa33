"""The native endpoints: columns of what is known of each token, streams of them, tokens and text, numbers, the page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from plain_words import PlainWords, small_tokenizer
from scripted import Scripted, logprob_of
from superstep.serve.api.generation import seed_of_choice
from superstep.serve.app import make_app
from superstep.serve.scheduling.request import Constraint, ModelInfo

TOKENIZER = small_tokenizer()
ANSWER = [70, 71, 72, 73, 74]
END = TOKENIZER.end_of_text


class Setting:
    """An application without a port."""

    def __init__(self, context_tokens: int = 64) -> None:
        info = ModelInfo(
            name="small", vocab=TOKENIZER.vocab, context_tokens=context_tokens, version="v1", end_of_text=(END,)
        )
        self.backend = Scripted(info, lambda request: ANSWER, adapters=("pirate",))
        self.app = make_app(self.backend, PlainWords(TOKENIZER, chat_stops=()))

    def send(self, method: str, path: str, **asked: object) -> httpx.Response:
        """One request."""

        async def one() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **asked)

        return asyncio.run(one())

    def generate(self, **body: object) -> dict:
        """What a sound request gives."""
        response = self.send("POST", "/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture
def setting() -> Iterator[Setting]:
    return Setting()


def test_all_that_is_known_of_a_token_is_told(setting):
    sampling = {"max_tokens": 20, "seed": 5, "top_k": 3, "top_logprobs": 2, "prompt_logprobs": True}
    found = setting.generate(prompt=[1, 2, 3, 4], sampling=sampling)
    (answer,) = found["answers"]
    drawn = [*ANSWER, END]
    assert answer["tokens"] == drawn
    assert answer["logprobs"] == [logprob_of(token) for token in drawn]
    assert answer["drawn_logprobs"] == [2 * logprob_of(token) for token in drawn]
    assert answer["kept"] == [3] * len(drawn)
    assert answer["versions"] == ["v1"] * len(drawn)
    assert answer["top"] == [[[token + rank, logprob_of(token) - rank] for rank in (0, 1)] for token in drawn]
    assert (answer["finish"], answer["stop"], answer["index"]) == ("stop", None, 0)
    assert answer["prompt"]["tokens"] == [2, 3, 4]
    assert answer["prompt"]["logprobs"] == [logprob_of(token) for token in (2, 3, 4)]
    assert (answer["prompt_tokens"], answer["cached_tokens"], found["seed"]) == (4, 2, 5)
    assert found["usage"]["total_tokens"] == 4 + len(drawn)


def test_every_field_reaches_the_engine(setting):
    plain = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "top_logprobs": 4,
        "prompt_logprobs": True,
    }
    others = {"logit_bias": {"5": 2}, "stop_tokens": [9], "constraint": {"kind": "regex", "text": "a+"}}
    setting.generate(prompt=[1], sampling=plain | others, priority=-5, adapter="pirate", salt="mine")
    (asked,) = setting.backend.asked
    assert {name: getattr(asked.sampling, name) for name in plain} == plain
    assert (asked.sampling.logit_bias, asked.sampling.stop_tokens) == (((5, 2.0),), (9,))
    assert asked.sampling.constraint == Constraint(kind="regex", text="a+")
    assert (asked.prompt, asked.priority, asked.adapter, asked.salt) == ((1,), -5, "pirate", "mine")


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_seeds_again(setting):
    drawn = setting.generate(prompt=[[1], [2]], n=2)["seed"]
    assert drawn != setting.generate(prompt=[1])["seed"]
    seeds = [request.sampling.seed for request in setting.backend.asked[:4]]
    assert sorted(seeds) == sorted([drawn, seed_of_choice(drawn, 1)] * 2)


@pytest.mark.parametrize("accept", ["application/x-ndjson", "text/event-stream"])
def test_a_stream_joined_is_the_whole(setting, accept):
    asked = {"prompt": [[1, 2], [3, 4, 5]], "n": 2, "sampling": {"max_tokens": 20, "seed": 5}}
    whole = setting.generate(**asked)
    response = setting.send("POST", "/generate", json=asked | {"stream": True}, headers={"Accept": accept})
    assert response.headers["content-type"].startswith(accept)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    *pieces, last = [json.loads(line) for line in lines]
    assert last == {"seed": 5, "usage": whole["usage"]}
    for answer in whole["answers"]:
        mine = [piece for piece in pieces if piece["index"] == answer["index"]]
        assert len(mine) == len(ANSWER) + 1
        for column in ("tokens", "logprobs", "drawn_logprobs", "kept", "versions", "top"):
            assert [entry for piece in mine for entry in piece[column]] == answer[column]
        assert [piece["finish"] for piece in mine] == [None] * (len(mine) - 1) + [answer["finish"]]
        assert mine[0]["prompt_tokens"] == answer["prompt_tokens"]


def test_an_engine_that_is_lost_is_told_in_a_line(setting):
    setting.backend.fails_after = 1
    response = setting.send("POST", "/generate", json={"prompt": [1], "stream": True})
    first, last = [json.loads(line) for line in response.text.splitlines()]
    assert first["tokens"] == [70]
    assert last["error"]["code"] == "engine_away"
    setting.backend.fails_after = 0
    response = setting.send("POST", "/generate", json={"prompt": [1], "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_text_to_tokens_and_back(setting):
    text = "naïve 😀 <|endoftext|>"
    found = setting.send("POST", "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == TOKENIZER.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 64)
    assert len(found["token_strs"]) == found["count"]
    assert setting.send("POST", "/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = setting.send("POST", "/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"] == TOKENIZER.encode("user: hi\nassistant:")


def test_a_long_text_is_encoded_where_nobody_waits():
    text = "the quick brown fox " * 5_000
    found = Setting(context_tokens=10_000).send("POST", "/tokenize", json={"prompt": text}).json()
    assert found["tokens"] == TOKENIZER.encode(text)


def test_health_follows_the_engine(setting):
    response = setting.send("GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ready", "model": "small", "version": "v1"})
    setting.backend.is_ready = False
    response = setting.send("GET", "/health")
    assert (response.status_code, response.json()["status"]) == (503, "starting")


def numbers(setting: Setting) -> dict[tuple[str, ...], float]:
    """Each number that is told, by its name and what distinguishes it."""
    response = setting.send("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            assert labels.pop("model_name") == "small"
            found[sample.name, *labels.values()] = sample.value
    return found


def test_metrics_have_vllms_names_and_count_what_happened(setting):
    setting.backend.at_once = 3
    setting.generate(prompt=[1, 2, 3], sampling={"max_tokens": 20})
    setting.generate(prompt=[1, 2], sampling={"max_tokens": 2})
    setting.send("POST", "/generate", json={"prompt": []})
    found = numbers(setting)
    assert found["vllm:num_requests_running",] == 0
    assert found["vllm:num_requests_waiting",] == 3
    assert found["vllm:kv_cache_usage_perc",] == 0.25
    assert found["vllm:num_preemptions_total",] == 5
    assert (found["vllm:prefix_cache_queries_total",], found["vllm:prefix_cache_hits_total",]) == (64, 32)
    assert found["vllm:prompt_tokens_total",] == 5
    assert found["vllm:generation_tokens_total",] == len(ANSWER) + 1 + 2
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:time_to_first_token_seconds_count",] == 2
    assert found["vllm:inter_token_latency_seconds_count",] == 3
    assert found["vllm:e2e_request_latency_seconds_count",] == 2
    assert found["vllm:request_generation_tokens_sum",] == len(ANSWER) + 1 + 2
    assert found["superstep:requests_refused_total", "400"] == 1
    assert found["superstep:ready",] == 1


def test_the_metrics_of_two_servers_do_not_meet(setting):
    other = Setting()
    other.generate(prompt=[1])
    assert numbers(setting)["vllm:prompt_tokens_total",] == 0


def test_the_page_needs_nothing_from_elsewhere(setting):
    response = setting.send("GET", "/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"(?!data:)", response.text)
    assert "//" not in re.sub(r"^\s*//.*$", "", response.text, flags=re.MULTILINE)
    for field in re.findall(r"(?:const|function|let) (\w+)", response.text):
        assert response.text.count(field) > 1, f"{field} is never used"
    assert "v1/chat/completions" in response.text
