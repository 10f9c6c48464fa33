"""Tool calls are found however the text is cut, and what is no call stays text."""

import json
import random
import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from legal import allowed, draw
from schemas import obj, valid
from spellings import FAMILIES
from superstep.errors import ConfigError
from superstep.serve.text.answer_reader import AnswerReader
from superstep.serve.text.detokenize import TokenTexts
from superstep.serve.text.grammar import Grammars
from superstep.serve.text.partial_json import JsonScan
from superstep.serve.text.tool_call_parser import CallParser, ToolCall, form_of, read_calls
from superstep.serve.text.tool_choice import check_tools, tool_constraint

NAMES = ("add", "now")
FORMS = ("hermes", "llama", "mistral")
SCRAPS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    '{"name": "add", "arguments": {"a": "</tool_call>{[\\"}"}}',
    '{"name": "add", "parameters": {"a": 1, "b": [true, null]}}',
    '[{"name": "now"}, {"name": "add", "arguments": {}}]',
    '{"name": "other", "arguments": {}}',
    '{"name": "add", "arguments": 3}',
    '{"a": 1}',
    "{",
    "}",
    '"',
    "[",
    "<",
    " ",
    "\n",
    ";",
    "hi",
    "日本",
]
answers = st.lists(st.sampled_from(SCRAPS), max_size=9).map("".join)


def parse(form, pieces, names=NAMES):
    parser = CallParser(form, names)
    deltas = [*(parser.push(piece) for piece in pieces), parser.end()]
    return "".join(delta.text for delta in deltas), [call for delta in deltas for call in delta.calls]


def whole(form, text):
    """All calls of an answer by a search for whole ones, from left to right; the text without them."""
    calls, kept, place, after = [], "", 0, False
    while place < len(text):
        found = call_at(form, text, place, is_line_start=after or kept.rstrip(" \t\r")[-1:] in ("", "\n"), after=after)
        if found:
            calls += found[0]
            place, after = found[1], True
            kept = kept.rstrip() if not kept.endswith(";") else kept
            continue
        kept += text[place]
        place += 1
        after = after and text[place - 1].isspace()
    return kept, calls


def call_at(form, text, place, *, is_line_start, after):
    opener = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}[form]
    if text.startswith(opener, place):
        begin = place + len(opener)
    elif form == "llama" and is_line_start and text[place] == "{":
        begin = place
    else:
        return None
    body = re.compile(r"\s*").match(text, begin).end()
    try:
        value, end = json.JSONDecoder().raw_decode(text, body)
    except ValueError:
        return None
    if not isinstance(value, list if form == "mistral" else dict):
        return None
    calls = read_calls(json.dumps(value), form, frozenset(NAMES))
    if form == "hermes":
        rest = text[re.compile(r"\s*").match(text, end).end() :]
        if rest.startswith("</tool_call>"):
            end = len(text) - len(rest) + len("</tool_call>")
        elif "</tool_call>".startswith(rest):
            end = len(text)
        else:
            return None
    return (calls, end) if calls else None


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=400)
@given(text=answers, cuts=st.lists(st.integers(0, 300)))
def test_cuts_change_nothing(form, text, cuts):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parse(form, [text[a:b] for a, b in pairwise(places)]) == parse(form, [text])


@pytest.mark.parametrize("form", ["hermes", "mistral"])
@settings(max_examples=400)
@given(text=answers)
@example(text='[TOOL_CALLS][TOOL_CALLS][{"name": "now"}]')
@example(text='<tool_call>{"name": "now"}<tool_call>{"name": "now"}')
def test_calls_are_those_that_a_search_of_the_whole_finds(form, text):
    kept, calls = parse(form, [text])
    expected = whole(form, text)
    assert calls == expected[1]
    assert "".join(kept.split()) == "".join(expected[0].split())


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=200)
@given(text=answers)
def test_no_text_is_lost(form, text):
    kept, calls = parse(form, [text])
    if not calls:
        assert kept == text


CALL = ToolCall("add", '{"a": 1}')
BODY = '{"name": "add", "arguments": {"a": 1}}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "kept", "calls"),
    [
        ("hermes", f"Wait.\n<tool_call>\n{BODY}\n</tool_call>", "Wait.\n", [CALL]),
        ("hermes", f"<tool_call>{BODY}</tool_call>\n<tool_call>{BODY}</tool_call> so", "so", [CALL, CALL]),
        ("hermes", f"<tool_call>{BODY}", "", [CALL]),
        ("hermes", f"<tool_call>{BODY}\n</tool", "", [CALL]),
        ("hermes", f"<tool_call>{BODY} x</tool_call>", f"<tool_call>{BODY} x</tool_call>", []),
        ("hermes", f"<tool_call>{{bad</tool_call><tool_call>{BODY}</tool_call>", "<tool_call>{bad</tool_call>", [CALL]),
        ("hermes", f"Use <tool_call> so: <tool_call>{BODY}</tool_call>", "Use <tool_call> so: ", [CALL]),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [ToolCall("now", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', None, []),
        ("hermes", "<tool_call>" + "[" * 99, None, []),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 80 + "1" + "}" * 81, None, []),
        ("hermes", " <tool", None, []),
        ("llama", LLAMA, "", [CALL]),
        ("llama", f"<|python_tag|>{LLAMA}", "", [CALL]),
        ("llama", f"{LLAMA}; {LLAMA}", "", [CALL, CALL]),
        ("llama", f"Sure:\n{LLAMA}\nDone.", "Sure:\n", [CALL]),
        ("llama", f"Not {LLAMA}", None, []),
        ("llama", '{"name": "add"}', None, []),
        ("llama", '{"answer": {"name": 3}}', None, []),
        ("mistral", f"[TOOL_CALLS][{BODY}, {BODY}]", "", [CALL, CALL]),
        ("mistral", f"[TOOL_CALLS] [{BODY}]", "", [CALL]),
        ("mistral", "[TOOL_CALLS][]", None, []),
        ("mistral", f"[TOOL_CALLS][{BODY}, 3]", None, []),
        ("mistral", f"[TOOL_CALLS]{BODY}", None, []),
    ],
)
def test_answers_of_each_form(form, text, kept, calls):
    kept = text if kept is None else kept
    found = parse(form, [text])
    assert found[1] == calls
    assert found[0].removesuffix("Done.").rstrip() == kept.rstrip()
    assert parse(form, list(text)) == found


def test_half_a_surrogate_pair_in_a_call_can_be_sent():
    _, calls = parse("hermes", ['<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'])
    assert calls[0].arguments.encode() == b'{"a": "\\ud800"}'


def test_text_that_is_no_call_does_not_wait():
    parser = CallParser("llama", NAMES)
    assert parser.push('{"na').text == ""
    assert parser.push('ive":').text == '{"naive":'
    parser = CallParser("hermes", NAMES)
    assert parser.push("a <b").text == "a <b"
    assert parser.push("<tool_cal").text == ""
    assert parser.push("k").text == "<tool_calk"


def test_a_call_waits_until_it_is_whole_and_comes_at_once():
    parser = CallParser("hermes", NAMES)
    for char in f"<tool_call>{BODY}</tool_call":
        delta = parser.push(char)
        assert (delta.text, delta.calls) == ("", ())
    assert parser.push(">").calls == (CALL,)


def test_the_end_of_json_is_found():
    for text in ("{}", '{"a": "}\\"]"}', "[[1, {}], 2]"):
        scan = JsonScan()
        assert [scan.see(char) for char in text] == ["more"] * (len(text) - 1) + ["end"]
    for text in ("{]", '{"\n', "{x", "1", "[" * 65):
        scan = JsonScan()
        assert "broken" in [scan.see(char) for char in text]


def test_a_template_shows_the_form_of_calls():
    assert form_of("... <tool_call> ...") == "hermes"
    assert form_of("[TOOL_CALLS]") == "mistral"
    assert form_of("""'{"name": ' + x + '"parameters": '""") == "llama"
    assert form_of("{{ messages }}") is None


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TREE = {
    "$defs": {"n": obj([], next={"$ref": "#/$defs/n"})},
    **obj(n={"$ref": "#/$defs/n"}, k={"enum": [1, 2]}),
}
TOOLS = [tool("add", obj(a={"type": "integer"}, b={"type": "boolean"})), tool("tree", TREE), tool("now")]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] or {"type": "object"} for one in TOOLS}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["byte_level", "llama"])
def test_answers_that_must_call_do_and_as_the_tools_say(form, family):
    tokenizer = FAMILIES[family]()
    words = TokenTexts(tokenizer)
    grammars = Grammars(tokenizer)
    source = random.Random(5)
    named = {"type": "function", "function": {"name": "tree"}}
    for choice, is_parallel in (("required", True), ("required", False), (named, True)):
        constraint = tool_constraint(TOOLS, choice, form, tokenizer, is_parallel=is_parallel)
        for _ in range(4):
            matcher = grammars.matcher(constraint)
            assert tokenizer.end_of_text not in allowed(matcher)
            reader = AnswerReader(words)
            tokens = draw(matcher, tokenizer, source, soon=20)
            text = "".join(news.text for news in [*map(reader.push, tokens), reader.end()])
            kept, calls = parse(form, [text], names=SCHEMAS)
            assert matcher.may_end, text
            assert kept == "", text
            assert calls
            assert len(calls) == 1 or (is_parallel and choice == "required")
            for call in calls:
                assert valid(json.loads(call.arguments), SCHEMAS[call.name]), text
                assert choice == "required" or call.name == "tree"


def test_a_choice_that_asks_nothing_constrains_nothing():
    tokenizer = FAMILIES["byte_level"]()
    assert tool_constraint(TOOLS, "auto", "hermes", tokenizer) is None
    assert tool_constraint([], "none", None, tokenizer) is None
    assert check_tools(TOOLS) == ("add", "tree", "now")


@pytest.mark.parametrize(
    ("tools", "choice", "form", "reason"),
    [
        (TOOLS, "must", "hermes", "tool_choice = 'must' must be none, auto, required"),
        ([], "required", "hermes", "needs tools"),
        (TOOLS, "required", None, "shows no form of calls"),
        (TOOLS, {"type": "function"}, "hermes", "names no function"),
        (TOOLS, {"type": "function", "function": {"name": "ad"}}, "hermes", "no tool here; did you mean 'add'"),
        ([*TOOLS, tool("add")], "auto", "hermes", "has 'add' 2 times"),
        ([tool("a b")], "auto", "hermes", r"tools\[0\]\.function\.name = 'a b' must be"),
        ([{"type": "web"}], "auto", "hermes", r"tools\[0\] is no function"),
        ([tool("a", [3])], "auto", "hermes", "must be a JSON schema"),
        ([tool(f"t{k}") for k in range(129)], "auto", "hermes", "129 entries; give at most 128"),
    ],
)
def test_tools_and_choices_that_cannot_be_are_refused(tools, choice, form, reason):
    with pytest.raises(ConfigError, match=reason):
        tool_constraint(tools, choice, form, FAMILIES["byte_level"]())
