"""What cannot be answered is refused with the field and the rule, and the engine never hears of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields

import httpx
import pytest

from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from served import Served, served
from superstep.http.limits import parse
from superstep.http.request_error import RequestError
from superstep.serve.api.generate_endpoint import SamplingFields
from superstep.serve.api.limits import Limits
from superstep.serve.app import make_app
from superstep.serve.scheduling.request import ModelInfo, Sampling

TOKENIZER = small_tokenizer()
LIMITS = Limits(body_bytes=100_000, stall_s=0.3, queue=4, choices=6, json_depth=20, json_values=20_000)
CHAT, PLAIN, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather"}}
NESTED = "[" * 30 + "]" * 30


class Setting:
    """A server with small limits, and its engine."""

    def __init__(self, server: Served, backend: Scripted) -> None:
        self.server, self.backend = server, backend
        self.client = httpx.Client(base_url=server.url, timeout=30)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=30)


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    end = TOKENIZER.end_of_text
    info = ModelInfo(name="small", vocab=TOKENIZER.vocab, context_tokens=64, version="v1", end_of_text=(end,))
    backend = Scripted(info, lambda request: [1, 2, 3])
    with served(make_app(backend, PlainWords(TOKENIZER), limits=LIMITS)) as server:
        yield Setting(server, backend)


BAD = [
    # path, body (what is given replaces what is sound), status, field, a part of the rule
    (PLAIN, {"prompt": None}, 400, "prompt", "prompt is missing"),
    (PLAIN, {"prompt": ""}, 400, "prompt", "at least one token"),
    (PLAIN, {"prompt": []}, 400, "prompt", "at least one token"),
    (PLAIN, {"prompt": [[1], []]}, 400, "prompt", "at least one token"),
    (PLAIN, {"prompt": {"a": 1}}, 400, "prompt", "must be text"),
    (PLAIN, {"prompt": [1, "a"]}, 400, "prompt", "must be text"),
    (PLAIN, {"prompt": [1, True]}, 400, "prompt", "must be text"),
    (PLAIN, {"prompt": [1] * 64}, 400, "prompt", "give at most 63"),
    (PLAIN, {"prompt": "a" * 90_000}, 400, "prompt", "prompt has 90000 bytes; 832 are the most"),
    (PLAIN, {"prompt": ["a"] * 7}, 400, "n", "over the limit of 6"),
    (PLAIN, {"prompt": [1, 10**9]}, 400, "prompt", "token ids of this model are 0 to"),
    (PLAIN, {"prompt": [-1]}, 400, "prompt", "token ids of this model are 0 to"),
    (PLAIN, {"n": 0}, 400, "n", "greater than or equal to 1"),
    (PLAIN, {"n": 129}, 400, "n", "less than or equal to 128"),
    (PLAIN, {"n": True}, 400, "n", "valid integer"),
    (PLAIN, {"n": 7}, 400, "n", "over the limit of 6"),
    (PLAIN, {"n": 5}, 400, "n", "the queue holds 4"),
    (PLAIN, {"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (PLAIN, {"max_tokens": 1.5}, 400, "max_tokens", "valid integer"),
    (PLAIN, {"temperature": "0.5"}, 400, "temperature", "valid number"),
    (PLAIN, {"temperature": -0.1}, 400, "temperature", "from 0 to 100"),
    (PLAIN, {"top_p": 0}, 400, "top_p", "above 0 and at most 1"),
    (PLAIN, {"top_k": -2}, 400, "top_k", "greater than or equal to -1"),
    (PLAIN, {"min_p": 1.1}, 400, "min_p", "from 0 to 1"),
    (PLAIN, {"presence_penalty": 3}, 400, "presence_penalty", "from -2 to 2"),
    (PLAIN, {"frequency_penalty": -3}, 400, "frequency_penalty", "from -2 to 2"),
    (PLAIN, {"repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    (PLAIN, {"logit_bias": {"a": 1}}, 400, "logit_bias", "keys are token ids"),
    (PLAIN, {"logit_bias": {"5": 101}}, 400, "logit_bias", "from -100 to 100"),
    (PLAIN, {"logit_bias": {"999999": 1}}, 400, "logit_bias", "token ids of this model"),
    (PLAIN, {"stop_token_ids": [999999]}, 400, "stop_token_ids", "token ids of this model"),
    (PLAIN, {"stop": [""]}, 400, "stop", "1 to 1000"),
    (PLAIN, {"stop": ["a"] * 17}, 400, "stop", "at most 16"),
    (PLAIN, {"stop": 5}, 400, "stop", "valid"),
    (PLAIN, {"seed": 2**64}, 400, "seed", "less than"),
    (PLAIN, {"logprobs": 65}, 400, "logprobs", "less than or equal to 64"),
    (PLAIN, {"suffix": "x"}, 400, "suffix", "not served"),
    (PLAIN, {"best_of": 3}, 400, "best_of", "must be n"),
    (PLAIN, {"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    (PLAIN, {"Temperature": 1}, 400, "Temperature", "did you mean 'temperature'"),
    (PLAIN, {"zzz": 1}, 400, "zzz", "not a field"),
    (PLAIN, {"stream_options": {"include_usage": True}}, 400, "stream_options", "set stream to true"),
    (PLAIN, {"stream": True, "stream_options": {"usage": True}}, 400, "stream_options.usage", "not a field"),
    (PLAIN, {"model": "smal"}, 404, "model", "did you mean 'small'"),
    (PLAIN, {"model": 5}, 400, "model", "valid string"),
    (PLAIN, {"regex": "(", "prompt": "a"}, 400, "regex", "cannot be read"),
    (PLAIN, {"regex": "a", "grammar": "b"}, 400, "grammar", "give one of them"),
    (PLAIN, {"priority": 2**31}, 400, "priority", "less than"),
    (PLAIN, {"cache_salt": "x" * 1025}, 400, "cache_salt", "at most 1024"),
    (CHAT, {"messages": None}, 400, "messages", "valid list"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1 item"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0].role", "is no role"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 500}]}, 400, "messages", "give at most 63"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "set logprobs to true"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens", "give one of them"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "greater than or equal to 1"),
    (CHAT, {"functions": []}, 400, "functions", "not a field"),
    (CHAT, {"modalities": ["audio"]}, 400, "modalities[0]", "'text'"),
    (CHAT, {"tools": [TOOL], "tool_choice": "x"}, 400, "tool_choice", "tool_choice = 'x': must be 'none', 'auto' or"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, 400, "tool_choice.function", "is missing"),
    (CHAT, {"response_format": 5}, 400, "response_format", "response_format = 5: must be an object."),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "give tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name", "pattern"),
    (CHAT, {"tools": [TOOL, TOOL]}, 400, "tools", "two functions"),
    (CHAT, {"tools": [TOOL], "regex": "a"}, 400, "tools", "leave out the form"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        400,
        "tool_choice.function.name",
        "choose one of weather",
    ),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type", "'json_object'"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "is missing"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
        400,
        "response_format",
        "no object",
    ),
    (NATIVE, {"prompt": "text"}, 400, "prompt", "list of token ids"),
    (NATIVE, {"prompt": []}, 400, "prompt", "at least one token"),
    (NATIVE, {"prompt": [999999]}, 400, "prompt", "token ids of this model"),
    (NATIVE, {"n": 0}, 400, "n", "greater than or equal to 1"),
    (NATIVE, {"adapter": "pirate"}, 404, "adapter", "is not loaded"),
    (NATIVE, {"sampling": {"temperature": -1}}, 400, "sampling.temperature", "from 0 to 100"),
    (NATIVE, {"sampling": {"stop_tokens": [-1]}}, 400, "sampling.stop_tokens", "token ids of this model"),
    (NATIVE, {"sampling": {"stop": "a"}}, 400, "sampling.stop", "not a field"),
    (NATIVE, {"sampling": {"seed": -1}}, 400, "sampling.seed", "greater than or equal to 0"),
    (
        NATIVE,
        {"sampling": {"constraint": {"kind": "regex", "text": "("}}},
        400,
        "sampling.constraint",
        "cannot be read",
    ),
    (NATIVE, {"sampling": {"constraint": {"kind": "xml"}}}, 400, "sampling.constraint.kind", "'regex'"),
    ("/tokenize", {"prompt": None}, 400, "prompt", "give one of them"),
    ("/detokenize", {"tokens": [999999]}, 400, "tokens", "token ids of this model"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens", "valid list"),
]
SOUND = {
    PLAIN: {"model": "small", "prompt": "the"},
    CHAT: {"model": "small", "messages": HELLO},
    NATIVE: {"prompt": [1, 2]},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [1]},
}


def refusal(response: httpx.Response, status: int, field: str | None, rule: str) -> None:
    """Asserts OpenAI's form of an error, in one line."""
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, field), error
    assert rule in error["message"], error
    assert "\n" not in error["message"]
    if field is not None:
        assert field.split("[")[0].split(".")[0] in error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error", "rate_limit_error")


@pytest.mark.parametrize("path", SOUND)
def test_what_is_sound_is_answered(setting, path):
    assert setting.client.post(path, json=SOUND[path]).status_code == 200


def test_each_bad_field_is_named_with_its_rule_and_the_engine_untouched(setting):
    setting.backend.asked.clear()
    for path, change, status, field, rule in BAD:
        refusal(setting.client.post(path, json=SOUND[path] | change), status, field, rule)
    assert setting.backend.asked == []


@pytest.mark.long
def test_the_same_is_refused_of_a_stream_with_a_status_of_its_own(setting):
    setting.backend.asked.clear()
    for path, change, status, field, rule in BAD:
        if path in (PLAIN, CHAT, NATIVE) and "stream_options" not in change:
            refusal(setting.client.post(path, json=SOUND[path] | change | {"stream": True}), status, field, rule)
    assert setting.backend.asked == []


@pytest.mark.parametrize(
    ("body", "status", "field", "rule"),
    [
        (b"", 400, None, "no JSON"),
        (b"{", 400, None, "no JSON"),
        (b"[1]", 400, None, "no JSON object"),
        (b'{"prompt": "\xff"}', 400, None, "no UTF-8"),
        (b'{"prompt": "a\\ud800b"}', 400, "prompt", "surrogate pair"),
        (b'{"prompt": ["a", "\\udc00"]}', 400, "prompt[1]", "surrogate pair"),
        (b'{"prompt": "a", "stop": ["\\ud83d"]}', 400, "stop[0]", "surrogate pair"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature", "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", "finite"),
        (b'{"prompt": "a", "temperature": -Infinity}', 400, "temperature", "finite"),
        (b'{"prompt": ' + NESTED.encode() + b"}", 400, None, "nests deeper than 20"),
        (b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, None, "more than 20000 values"),
        (b'{"prompt": ' + b"[" * 9_000 + b"]" * 9_000 + b"}", 400, None, "nests deeper than 20"),
        (b'{"prompt": [' + b"1," * 30_000 + b"1]}", 400, None, "more than 20000 values"),
        (b'{"max_tokens": ' + b"9" * 6_000 + b"}", 400, None, "no JSON"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(setting, body, status, field, rule):
    setting.backend.asked.clear()
    response = setting.client.post(PLAIN, content=body, headers={"Content-Type": "application/json"})
    refusal(response, status, field, rule)
    assert setting.backend.asked == []


def test_separators_within_text_are_no_values():
    text = ",[{" * 20_000
    assert parse(json.dumps({"prompt": text}).encode(), Limits(json_values=100)) == {"prompt": text}
    with pytest.raises(RequestError, match="more than 100 values"):
        parse(json.dumps({"prompt": text, "more": [1] * 200}).encode(), Limits(json_values=100))


def test_of_a_number_that_is_too_long_no_setting_of_python_is_told():
    with pytest.raises(RequestError, match=r"body is no JSON \(Exceeds .* 5000 digits\); send one object\.$"):
        parse(b'{"prompt": [' + b"9" * 5000 + b"]}", Limits())


def test_a_whole_pair_of_surrogates_is_a_character():
    assert parse(b'{"prompt": "\\ud83d\\ude00"}', Limits()) == {"prompt": "😀"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PLAIN, CHAT, NATIVE])
def test_more_tokens_than_the_context_has_room_for_are_told(setting, path, stream):
    def warning(tokens: int) -> str | None:
        asked = {"sampling": {"max_tokens": tokens}} if path == NATIVE else {"max_tokens": tokens}
        response = setting.client.post(path, json=SOUND[path] | asked | {"stream": stream})
        assert response.status_code == 200
        return response.headers.get("warning")

    cut = re.fullmatch(r'299 - "max_tokens = 64 is more than .* an answer has at most (\d+)\."', warning(64))
    most = int(cut[1])
    assert 0 < most < 64
    assert f"at most {most}." in warning(most + 1)
    assert warning(most) is None


@pytest.mark.parametrize("path", ["/tokenize", PLAIN])
def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized(setting, monkeypatch, path):
    tokenized = []
    monkeypatch.setattr(PlainWords, "encode", lambda self, text: tokenized.append(text))
    response = setting.client.post(path, json={"prompt": "a" * 90_000})
    refusal(response, 400, "prompt", "prompt has 90000 bytes")
    assert tokenized == []


def test_a_body_of_another_type_is_refused_so_that_other_pages_cannot_send_it(setting):
    response = setting.client.post(PLAIN, content=b"{}", headers={"Content-Type": "text/plain"})
    refusal(response, 415, "content-type", "application/json")


def test_paths_that_are_not_served_are_told(setting):
    refusal(setting.client.get("/v2/nothing"), 404, None, "POST /v1/completions")
    wrong = setting.client.get(PLAIN)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "use POST" in wrong.json()["error"]["message"]


def read_status(connection: socket.socket) -> int:
    """The status that comes back; the connection is then closed by the other side."""
    told = b""
    while part := connection.recv(65536):
        told += part
    return int(told.split(b" ", 2)[1])


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_large_body_is_refused_before_it_is_read(setting):
    with setting.connect() as connection:  # by what it says of itself: not a byte of the body is sent
        connection.sendall(HEAD + b"Content-Length: 100001\r\n\r\n")
        assert read_status(connection) == 413
    with setting.connect() as connection:  # by what comes: it never ends
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            connection.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert read_status(connection) == 413


def test_a_body_that_stalls_is_refused(setting):
    with setting.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert read_status(connection) == 408


def wait_until(condition) -> None:
    """Until it holds, with an end far off."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_queue_says_when_to_come_again(setting):
    gate = setting.backend.gate = asyncio.Event()
    waiting = [setting.connect() for _ in range(2)]
    body = json.dumps({"prompt": [1], "n": 2}).encode()
    for connection in waiting:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
    wait_until(lambda: setting.backend.live == 4)
    response = setting.client.post(PLAIN, json=SOUND[PLAIN])
    refusal(response, 429, None, "the queue is full")
    assert int(response.headers["Retry-After"]) >= 1
    setting.server.loop.call_soon_threadsafe(gate.set)
    assert [read_status(connection) for connection in waiting] == [200, 200]
    setting.backend.gate = None
    assert setting.client.post(PLAIN, json=SOUND[PLAIN]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PLAIN, CHAT, NATIVE])
@pytest.mark.parametrize("pieces", [0, 1])
def test_a_client_that_vanishes_takes_its_requests_back(setting, path, stream, pieces):
    """Whether before the first token or amid them: all of its answers, at once."""
    setting.backend.asked.clear()
    setting.backend.script = lambda request: [65] * 40
    gate = setting.backend.gate = asyncio.Event()
    body = json.dumps(SOUND[path] | {"n": 3, "stream": stream}).encode()
    connection = setting.connect()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    wait_until(lambda: setting.backend.live == 3)
    if pieces and stream:
        setting.server.loop.call_soon_threadsafe(lambda: (gate.set(), setting.server.loop.call_soon(gate.clear)))
        assert connection.recv(65536)
    connection.close()
    wait_until(lambda: setting.backend.live == 0)
    assert [setting.backend.ended[request.id] for request in setting.backend.asked] == ["taken back"] * 3
    setting.backend.gate = None
    assert setting.client.post(PLAIN, json=SOUND[PLAIN]).status_code == 200


def test_half_of_the_clients_vanish_at_random_and_the_others_lose_nothing(setting):
    """Each reads for a while; every place in the queue is free again at the end."""
    setting.backend.script = lambda request: [65 + (request.prompt[0] + place) % 50 for place in range(40)]
    draw = random.Random(5)
    leaves_at = [draw.choice([None, draw.randrange(1, 6000)]) for _ in range(150)]

    async def client(number: int) -> list[int] | None:
        body = json.dumps({"prompt": [number], "stream": True, "sampling": {"max_tokens": 40}}).encode()
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", setting.server.port)
            head = (
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
            )
            writer.write(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            try:
                if (size := leaves_at[number]) is not None:
                    with suppress(asyncio.IncompleteReadError):
                        await reader.readexactly(size)
                    return None
                told = await reader.read()
            finally:
                writer.close()
            if b" 200 " in told[:20]:
                lines = [json.loads(line) for line in re.findall(rb"^{.*}$", told.replace(b"\r", b""), re.MULTILINE)]
                return [token for line in lines for token in line.get("tokens", [])]
            assert b" 429 " in told[:20]
            assert b"retry-after: " in told.lower()
            await asyncio.sleep(0.01)

    async def all_of_them() -> list[list[int] | None]:
        return await asyncio.gather(*map(client, range(150)))

    found = asyncio.run(all_of_them())
    for number, tokens in enumerate(found):
        if leaves_at[number] is None:
            assert tokens == [65 + (number + place) % 50 for place in range(40)]
    wait_until(lambda: setting.backend.live == 0)
    assert setting.client.post(NATIVE, json={"prompt": [1], "n": 4}).status_code == 200


def test_what_is_told_back_of_a_body_is_short_and_plain(setting):
    response = setting.client.post(PLAIN, json=SOUND[PLAIN] | {"temperature": "\x1b[31m" + "é" * 10_000})
    message = response.json()["error"]["message"]
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 200


def test_native_sampling_has_the_engines_fields():
    assert set(SamplingFields.model_fields) == {each.name for each in fields(Sampling)}
