"""Chats by the official client, unchanged: their streams, their calls of tools, the form of their answers."""

from __future__ import annotations

import json

import pytest

from official_client import ANSWER, HELLO, TOKENIZER
from scripted import logprob_of

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_a_chat_and_its_stream_say_the_same(setting):
    asked = {"model": "small", "messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 3}
    whole = setting.client.chat.completions.create(**asked)
    prompt = tuple(TOKENIZER.encode("user: hello\nassistant:"))
    assert [request.prompt for request in setting.backend.asked] == [prompt, prompt]
    for choice in whole.choices:
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
        assert choice.message.tool_calls is None
        first = choice.logprobs.content[0]
        assert first.logprob == logprob_of(TOKENIZER.encode(ANSWER)[0])
        assert bytes(first.bytes).decode(errors="replace") == first.token
        assert len(first.top_logprobs) == 2
        spelt = b"".join(bytes(one.bytes) for one in choice.logprobs.content[:-1])
        assert spelt.decode() == ANSWER
    chunks = list(setting.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in mine[1:])
        assert "".join(choice.delta.content or "" for choice in mine) == ANSWER
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        told = [one for choice in mine for one in choice.logprobs.content]
        assert told == whole.choices[index].logprobs.content


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_calls_and_their_stream_say_the_same(setting, choice):
    setting.say('so: <call>weather {"city": "Paris"}</call><call>weather {"city": "Rome"}</call>')
    asked = {"model": "small", "messages": HELLO, "tools": [TOOL], "tool_choice": choice}
    whole = setting.client.chat.completions.create(**asked).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "so: ")
    assert [
        (call.type, call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls
    ] == [
        ("function", "weather", {"city": "Paris"}),
        ("function", "weather", {"city": "Rome"}),
    ]
    assert TOKENIZER.decode(list(setting.last.prompt)).startswith("tools: ")
    assert setting.words.shown[-1]
    constraint = setting.last.sampling.constraint
    assert (constraint is None) == (choice == "auto")
    if constraint is not None:
        assert constraint in setting.words.checked
    with setting.client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "so: ")
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert len({call.id for call in final.message.tool_calls}) == 2


def test_tools_that_may_not_be_called_are_not_shown(setting):
    setting.say("<call>weather {}</call>")
    found = setting.client.chat.completions.create(
        model="small", messages=HELLO, tools=[TOOL], tool_choice="none"
    ).choices[0]
    assert (found.finish_reason, found.message.content) == ("stop", "<call>weather {}</call>")
    assert not setting.words.shown[-1]
    assert "tools" not in TOKENIZER.decode(list(setting.last.prompt))


def test_the_form_of_an_answer_reaches_the_engine(setting):
    setting.say('{"city": "Paris"}')
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    found = setting.client.chat.completions.create(model="small", messages=HELLO, response_format=form, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
    assert json.loads(text) == {"city": "Paris"}
    constraint = setting.last.sampling.constraint
    assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", SCHEMA)
    assert constraint in setting.words.checked
    for kind in ("json_object", "text"):
        setting.client.chat.completions.create(model="small", messages=HELLO, response_format={"type": kind})
        constraint = setting.last.sampling.constraint
        assert (constraint and constraint.kind) == (None if kind == "text" else kind)
