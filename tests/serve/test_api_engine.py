"""The official client against a real engine in a process of its own: nothing between them is scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plain_words import PlainWords, small_tokenizer
from served import served
from superstep.serve.app import make_app
from superstep.serve.config import ServeConfig
from superstep.serve.processes.engine_client import EngineClient

pytestmark = pytest.mark.multiproc

TOKENIZER = small_tokenizer()
EXTRA = {"return_token_ids": True, "ignore_eos": True}


class Setting:
    """An engine, its server, and where clients find it."""

    def __init__(self, host: EngineClient, url: str) -> None:
        self.host, self.url = host, f"{url}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def is_idle_within(self, seconds: float) -> bool:
        """Whether all pages are free again before long."""
        end = time.monotonic() + seconds
        while (now := self.host.counters()).used_pages or now.running or now.waiting:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("model")
    shape = LlamaConfig(
        vocab_size=TOKENIZER.vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=TOKENIZER.end_of_text,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(shape).save_pretrained(folder)
    TOKENIZER.save(folder / "tokenizer.json")
    host = EngineClient(folder, ServeConfig(compute="fp32", requests=16, exact=True), name="tiny")
    host.open()
    try:
        with served(make_app(host, PlainWords(TOKENIZER))) as server:
            yield Setting(host, server.url)
    finally:
        host.close()


def test_a_seed_gives_the_same_answer_whole_streamed_and_among_others(setting):
    asked = {"model": "tiny", "prompt": "the quick", "max_tokens": 12, "seed": 3, "extra_body": EXTRA}
    whole = setting.client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in setting.client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert len(whole.token_ids) == 12
    several = setting.client.completions.create(**asked | {"n": 3}).choices
    assert several[0].token_ids == whole.token_ids
    assert len({tuple(choice.token_ids) for choice in several}) == 3


def test_the_prompt_alone_is_scored(setting):
    asked = {"model": "tiny", "prompt": "the quick", "logprobs": 2, "echo": True, "max_tokens": 0}
    scores = setting.client.completions.create(**asked).choices[0].logprobs
    assert scores.token_logprobs[0] is None
    assert all(score < 0 for score in scores.token_logprobs[1:])
    assert len(scores.tokens) == len(TOKENIZER.encode("the quick"))


def test_streams_that_are_left_give_their_pages_back(setting):
    for _ in range(5):
        stream = setting.client.completions.create(
            model="tiny", prompt="the", max_tokens=250, n=4, stream=True, extra_body=EXTRA
        )
        next(iter(stream))
        stream.close()
    assert setting.is_idle_within(60)


def test_a_hundred_clients_are_answered_by_sixteen_places(setting):
    async def all_of_them() -> list[int]:
        async with openai.AsyncOpenAI(base_url=setting.url, api_key="none", max_retries=0) as client:
            found = await asyncio.gather(
                *(
                    client.completions.create(model="tiny", prompt=[1 + number], max_tokens=8, extra_body=EXTRA)
                    for number in range(100)
                )
            )
            return [len(one.choices[0].token_ids) for one in found]

    assert asyncio.run(all_of_them()) == [8] * 100
    assert setting.is_idle_within(60)
