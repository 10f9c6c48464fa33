"""The official client, unchanged, against a server on a port: each field of what it reads is what the engine said."""

from __future__ import annotations

import asyncio

import openai
import pytest

from official_client import ANSWER, HELLO, TOKENIZER
from scripted import logprob_of
from superstep.serve.api.generation import seed_of_choice
from superstep.serve.scheduling.request import Request


def test_models_and_adapters_are_listed(setting):
    listed = setting.client.models.list().data
    assert [(one.id, one.object, one.owned_by) for one in listed] == [
        ("small", "model", "superstep"),
        ("pirate", "model", "superstep"),
    ]
    assert setting.client.models.retrieve("pirate").id == "pirate"
    with pytest.raises(openai.NotFoundError, match="did you mean 'small'"):
        setting.client.models.retrieve("smal")


def test_a_completion_is_what_the_engine_drew(setting):
    prompt = "the quick"
    found = setting.client.completions.create(model="small", prompt=prompt, max_tokens=99, seed=5)
    tokens, asked = TOKENIZER.encode(ANSWER), TOKENIZER.encode(prompt)
    assert found.object == "text_completion"
    assert found.id.startswith("cmpl-")
    assert (found.model, found.system_fingerprint) == ("small", "v1")
    assert [(one.index, one.text, one.finish_reason, one.logprobs) for one in found.choices] == [
        (0, ANSWER, "stop", None)
    ]
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(asked), len(tokens) + 1)  # the end of text was drawn
    assert usage.total_tokens == len(asked) + len(tokens) + 1
    assert usage.prompt_tokens_details.cached_tokens == len(asked) // 2
    assert (setting.last.prompt, setting.last.sampling.seed) == (tuple(asked), 5)


def test_the_room_of_an_answer_is_sixteen_tokens_or_the_rest_of_the_context(setting):
    setting.client.completions.create(model="small", prompt=[1, 2, 3])
    assert setting.last.sampling.max_tokens == 16
    setting.client.completions.create(model="small", prompt=[1, 2, 3], max_tokens=10**9)
    assert setting.last.sampling.max_tokens == 253
    chat = setting.client.chat.completions.create(model="small", messages=HELLO)
    assert setting.last.sampling.max_tokens == 256 - chat.usage.prompt_tokens
    chat = setting.client.chat.completions.create(model="small", messages=HELLO, max_completion_tokens=2)
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage.completion_tokens == 2


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_stream_joined_is_the_whole(setting, at_once):
    setting.backend.at_once = at_once
    asked = {"model": "small", "prompt": "the", "n": 2, "logprobs": 2, "seed": 1, "max_tokens": 99}
    whole = setting.client.completions.create(**asked)
    texts, logprobs, ends = ["", ""], [[], []], [None, None]
    chunks = list(setting.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert "\N{REPLACEMENT CHARACTER}" not in choice.text
        texts[choice.index] += choice.text
        logprobs[choice.index] += zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset, strict=True
        )
        ends[choice.index] = ends[choice.index] or choice.finish_reason
    setting.backend.at_once = 1
    assert texts == [ANSWER, ANSWER] == [choice.text for choice in whole.choices]
    assert ends == ["stop", "stop"]
    for choice, told in zip(whole.choices, logprobs, strict=True):
        own = choice.logprobs
        assert told == list(zip(own.tokens, own.token_logprobs, own.text_offset, strict=True))


def test_nothing_is_told_or_counted_of_what_follows_a_stop_text(setting):
    setting.backend.at_once = 100
    setting.say("one two STOP three")
    asked = {"model": "small", "prompt": "the quick", "stop": "STOP", "max_tokens": 99, "logprobs": 0, "n": 2}
    found = setting.client.completions.create(**asked)
    setting.backend.at_once = 1
    slowly = setting.client.completions.create(**asked)
    assert (found.choices, found.usage) == (slowly.choices, slowly.usage)
    spelt = "".join(found.choices[0].logprobs.tokens)
    assert "STOP" in spelt
    assert "three" not in spelt
    assert found.usage.completion_tokens == 2 * len(found.choices[0].logprobs.tokens)
    assert found.usage.prompt_tokens_details.cached_tokens == len(TOKENIZER.encode("the quick")) // 2 > 0


def test_a_stream_without_usage_tells_none(setting):
    chunks = list(setting.client.completions.create(model="small", prompt="the", stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_n_answers_have_seeds_of_their_own_and_prompts_beside_each_other_do_not_matter(setting):
    found = setting.client.completions.create(model="small", prompt=["the", "a stop"], n=3, seed=7)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3, 4, 5]
    seeds = [request.sampling.seed for request in sorted(setting.backend.asked, key=lambda one: one.id)]
    assert seeds == [7, seed_of_choice(7, 1), seed_of_choice(7, 2)] * 2
    assert len(set(seeds)) == 3
    assert found.usage.prompt_tokens == sum(len(TOKENIZER.encode(text)) for text in ("the", "a stop"))
    setting.client.completions.create(model="small", prompt="the", seed=-1)
    assert setting.last.sampling.seed == 2**64 - 1
    drawn = set()
    for _ in range(3):
        setting.client.completions.create(model="small", prompt="the")
        drawn.add(setting.last.sampling.seed)
    assert len(drawn) == 3


def test_log_probs_of_completions_have_places_in_the_text(setting):
    found = setting.client.completions.create(model="small", prompt="the", logprobs=2, max_tokens=99)
    tokens, told = TOKENIZER.encode(ANSWER), found.choices[0].logprobs
    assert told.token_logprobs == [logprob_of(token) for token in [*tokens, TOKENIZER.end_of_text]]
    assert told.text_offset == sorted(told.text_offset)
    spelt = b""
    for place, token in zip(told.text_offset, tokens, strict=False):  # where the character is that its first byte is of
        spelt += (own := setting.words.token_bytes(token))
        whole = next(size for size in range(len(ANSWER) + 1) if len(ANSWER[:size].encode()) > len(spelt) - len(own))
        assert place == whole - 1
    assert spelt == ANSWER.encode()
    assert told.tokens[-1] == "<|endoftext|>"
    assert all(1 <= len(top) <= 2 for top in told.top_logprobs)
    likeliest = told.top_logprobs[0]
    assert likeliest[told.tokens[0]] == told.token_logprobs[0]


def test_an_echo_has_the_prompt_and_its_log_probs(setting):
    prompt = "the quick"
    tokens = TOKENIZER.encode(prompt)
    found = setting.client.completions.create(model="small", prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert choice.logprobs.token_logprobs == [None] + [logprob_of(token) for token in tokens[1:]]
    assert "".join(choice.logprobs.tokens) == prompt
    assert found.usage.completion_tokens == 0
    found = setting.client.completions.create(model="small", prompt=tokens, echo=True, logprobs=0, max_tokens=99)
    assert found.choices[0].text == prompt + ANSWER
    assert len(found.choices[0].logprobs.tokens) == len(tokens) + found.usage.completion_tokens
    chunks = list(
        setting.client.completions.create(model="small", prompt=prompt, echo=True, max_tokens=99, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompt + ANSWER


def test_a_stop_text_ends_the_answer_before_it_and_takes_the_request_back(setting):
    setting.say("one two STOP three")
    for stop in ("STOP", ["none", " STOP"]):
        found = setting.client.completions.create(model="small", prompt="the", stop=stop, max_tokens=99)
        assert found.choices[0].finish_reason == "stop"
        assert found.choices[0].text == "one two" + (" " if stop == "STOP" else "")
        assert found.choices[0].stop_reason == ("STOP" if stop == "STOP" else " STOP")
        assert setting.backend.ended[setting.last.id] == "taken back"
        assert setting.backend.live == 0
    setting.words.chat_stops = ("two",)
    chat = setting.client.chat.completions.create(model="small", messages=HELLO)
    setting.words.chat_stops = ()
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("one ", "stop")


def test_every_field_reaches_the_engine(setting):
    setting.client.completions.create(
        model="pirate",
        prompt="the",
        temperature=0.5,
        top_p=0.75,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "6": 1.5},
        user="somebody",
        extra_body={
            "top_k": 9,
            "min_p": 0.125,
            "repetition_penalty": 1.25,
            "stop_token_ids": [7, 8],
            "ignore_eos": True,
            "cache_salt": "mine",
            "priority": -3,
            "regex": "[a-z]+",
            "metadata": {"a": "b"},
            "store": True,
        },
    )
    sampling = setting.last.sampling
    assert (setting.last.adapter, setting.last.salt, setting.last.priority) == ("pirate", "mine", -3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 9, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, -0.5, 1.25)
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert (sampling.stop_tokens, sampling.ignore_eos) == ((7, 8), True)
    assert (sampling.constraint.kind, sampling.constraint.text) == ("regex", "[a-z]+")
    setting.client.completions.create(model="small", prompt="the", extra_body={"top_k": -1, "grammar": "start: /a/"})
    assert (setting.last.sampling.top_k, setting.last.sampling.constraint.kind) == (0, "lark")


def test_token_ids_and_log_probs_of_the_prompt_are_told_where_asked(setting):
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    prompt = TOKENIZER.encode("the quick")
    drawn = [*TOKENIZER.encode(ANSWER), TOKENIZER.end_of_text]
    (choice,) = setting.client.completions.create(model="small", prompt=prompt, max_tokens=99, extra_body=extra).choices
    assert (choice.prompt_token_ids, choice.token_ids) == (prompt, drawn)
    assert choice.prompt_logprobs[0] is None
    assert [row[str(token)]["logprob"] for row, token in zip(choice.prompt_logprobs[1:], prompt[1:], strict=True)] == [
        logprob_of(token) for token in prompt[1:]
    ]
    chat = setting.client.chat.completions.create(model="small", messages=HELLO, logprobs=True, extra_body=extra)
    assert chat.prompt_token_ids == list(setting.last.prompt)
    assert chat.choices[0].token_ids == drawn
    assert len(chat.choices[0].logprobs.content) == len(drawn)
    stream = setting.client.chat.completions.create(model="small", messages=HELLO, stream=True, extra_body=extra)
    chunks = list(stream)
    assert chunks[0].prompt_token_ids == list(setting.last.prompt)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == drawn


def test_a_token_that_the_client_named_ends_the_answer_without_text(setting):
    tokens = TOKENIZER.encode("one two")
    setting.backend.script = lambda request: [*tokens, 9, *tokens]
    found = setting.client.completions.create(
        model="small", prompt="the", max_tokens=99, extra_body={"stop_token_ids": [9]}
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("one two", "stop")
    assert found.choices[0].stop_reason == 9


def test_the_client_reads_refusals(setting):
    with pytest.raises(openai.BadRequestError) as caught:
        setting.client.completions.create(model="small", prompt="the", temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    assert "temperature = -1.0 must be from 0 to 100" in caught.value.message
    with pytest.raises(openai.NotFoundError, match="model = 'other'"):
        setting.client.chat.completions.create(model="other", messages=HELLO)
    setting.backend.is_full = True
    with pytest.raises(openai.RateLimitError) as busy:
        setting.client.completions.create(model="small", prompt="the", stream=True)
    setting.backend.is_full = False
    assert busy.value.response.headers["retry-after"] == "7"


def test_an_engine_that_is_lost_is_told_before_a_stream_and_within(setting):
    setting.backend.fails_after = 0
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            setting.client.completions.create(model="small", prompt="the", stream=stream)
        assert caught.value.status_code == 503
    setting.backend.fails_after = 2
    texts = []
    stream = setting.client.completions.create(model="small", prompt="the", n=2, stream=True)
    with pytest.raises(openai.APIError, match="the engine was lost"):
        texts.extend(chunk.choices[0].text for chunk in stream)
    setting.backend.fails_after = None
    assert texts
    assert setting.backend.live == 0


def test_two_hundred_clients_lose_no_token(setting):
    def script(request: Request) -> list[int]:
        return [1 + (request.prompt[0] * 7 + place) % 250 for place in range(24)]

    setting.backend.script = script

    async def one(client: openai.AsyncOpenAI, number: int) -> list[int]:
        asked = {
            "model": "small",
            "prompt": [number, 1],
            "max_tokens": 24,
            "extra_body": {"return_token_ids": True},
        }
        if number % 2:
            return (await client.completions.create(**asked)).choices[0].token_ids
        stream = await client.completions.create(**asked, stream=True)
        return [token async for chunk in stream for token in chunk.choices[0].token_ids]

    async def all_of_them() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{setting.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(1, 201)))

    found = asyncio.run(all_of_them())
    for number, tokens in enumerate(found, start=1):
        assert tokens == [1 + (number * 7 + place) % 250 for place in range(24)]
    assert len(setting.backend.asked) == 200
    assert setting.backend.live == 0
