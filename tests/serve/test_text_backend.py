"""The words of a model are what the HTTP interface and the engine ask for."""

import json

import pytest
import torch

from schemas import obj
from spellings import byte_level
from superstep.errors import ConfigError
from superstep.serve.api.text_protocol import AnswerPiece, TextProtocol, ToolUse
from superstep.serve.drafting.grammar_protocol import Matchers
from superstep.serve.scheduling.request import Constraint, Request, Sampling
from superstep.serve.text.chat_template import DEFAULT, DEFAULT_STOPS, ChatTemplate
from superstep.serve.text.grammar import Grammars
from superstep.serve.text_backend import TextBackend, make_matchers

TOOL = {"type": "function", "function": {"name": "add", "parameters": obj(a={"type": "boolean"})}}
USE = ToolUse(tools=(TOOL,), is_required=True)
MISTRAL = "{{ messages[0].content }}[TOOL_CALLS]"


@pytest.fixture(scope="module")
def made():
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, vocab=tokenizer.vocab + 9)
    templates = [ChatTemplate({"default": DEFAULT}, stops=DEFAULT_STOPS), ChatTemplate({"default": MISTRAL})]
    yield [TextBackend(tokenizer, template, grammars) for template in templates], grammars, tokenizer
    for template in templates:
        template.close()


def test_a_model_without_a_template_chats_in_plain_words(made):
    words: TextProtocol = made[0][0]
    prompt = words.chat([{"role": "user", "content": "the cat"}], [])
    assert words.decode(prompt) == "User: the cat\n\nAssistant:"
    assert words.chat_stops == DEFAULT_STOPS
    reader = words.reader(words.chat_stops)
    text = ""
    for token in [*words.encode("a 日本\n\nUser: b")]:
        text += reader.push(token)
        if reader.stop:
            break
    assert (text + reader.end(), reader.stop) == ("a 日本", "\n\nUser:")
    assert [said.content for said in words.tool_reader(USE).push("x")] == ["x"]
    with pytest.raises(ConfigError, match="shows no form of calls"):
        words.tool_constraint(USE)
    with pytest.raises(ConfigError, match="empty text"):
        words.reader([""])


def test_a_chat_whose_text_is_too_long_is_not_tokenized(made):
    words = made[0][0]
    chat = [{"role": "user", "content": "the cat"}]
    text = words.decode(words.chat(chat, []))
    assert words.chat(chat, [], most_bytes=len(text)) == words.chat(chat, [])
    with pytest.raises(ConfigError, match=f"messages are a prompt of {len(text)} bytes"):
        words.chat(chat, [], most_bytes=len(text) - 1)


def test_no_token_is_longer_than_the_longest(made):
    words, tokenizer = made[0][0], made[2]
    longest = words.longest_token_bytes
    assert longest == max(len(words.token_bytes(token)) for token in range(tokenizer.vocab))
    text = "the cat sat on the mat, 日本 " * 50
    assert len(words.encode(text)) * longest >= len(text.encode())


def test_calls_are_asked_for_and_read_back(made):
    words: TextProtocol = made[0][1]
    tokenizer = made[2]
    constraint = words.tool_constraint(USE)
    words.check_constraint(constraint)
    assert words.tool_constraint(ToolUse(tools=(TOOL,))) is None
    assert words.tool_constraint(ToolUse(tools=(TOOL,), only="add")).text != constraint.text
    matchers: Matchers = make_matchers(made[1], tokenizer.vocab + 9)
    form = matchers(Request(id=1, prompt=(1,), sampling=Sampling(constraint=constraint)))
    assert matchers(Request(id=2, prompt=(1,))) is None
    body = '[{"name": "add", "arguments": {"a": true}}]'
    tokens = [tokenizer.core.token_to_id("[TOOL_CALLS]"), *map(tokenizer.core.token_to_id, body.replace(" ", "Ġ"))]
    reader, calls, said = words.reader([]), words.tool_reader(USE), []
    for token in tokens:
        allowed = form.compute_mask()
        assert (allowed.shape, allowed.dtype) == ((tokenizer.vocab + 9,), torch.bool)
        if not allowed[token]:
            break  # the text is forced from here on, in the longest tokens
        form.advance(token)
        assert not allowed[tokenizer.end_of_text]
    for token in [*tokens, tokenizer.end_of_text]:
        said += calls.push(reader.push(token))
    said += [*calls.push(reader.end()), *calls.end()]
    assert said == [AnswerPiece(call=0, name="add", arguments=json.dumps({"a": True}))]
    with pytest.raises(AssertionError, match="not allowed"):
        form.advance(tokenizer.end_of_text)


def test_bad_constraints_are_refused_before_the_engine_sees_them(made):
    with pytest.raises(ConfigError, match="regex cannot be used"):
        made[0][0].check_constraint(Constraint(kind="regex", text="("))
