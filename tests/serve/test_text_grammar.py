"""Answers of a given form: masks allow legal tokens and no others, and what would cost too much is refused."""

import json
import random
import re
from functools import cache

import pytest

from legal import allowed, draw
from schemas import SCHEMAS, obj, valid
from spellings import FAMILIES, byte_level, llama
from superstep.errors import ConfigError
from superstep.serve.scheduling.request import Constraint
from superstep.serve.text import grammar
from superstep.serve.text.detokenize import TokenTexts
from superstep.serve.text.grammar import Grammars


@cache
def grammars(family="byte_level"):
    return Grammars(FAMILIES[family]())


def schema(told):
    return Constraint(kind="json_schema", text=json.dumps(told))


@pytest.mark.parametrize("family", ["byte_level", "llama", "metaspace_fallback"])
@pytest.mark.parametrize("told", SCHEMAS, ids=lambda told: json.dumps(told)[:60])
def test_random_legal_tokens_give_documents_of_the_schema(family, told):
    tokenizer = FAMILIES[family]()
    source = random.Random(json.dumps(told))
    for _ in range(4):
        matcher = grammars(family).matcher(schema(told))
        text = tokenizer.decode(draw(matcher, tokenizer, source))
        assert matcher.may_end, text
        assert valid(json.loads(text), told), text


def test_the_validator_can_say_no():
    assert not valid({"a": 1}, obj(a={"type": "boolean"}))
    assert not valid({"a": True, "b": 1}, obj(a={"type": "boolean"}))
    assert not valid([1, 2, 3], {"maxItems": 2})
    assert not valid(True, {"enum": [1]})


@pytest.mark.parametrize("family", ["byte_level", "llama"])
def test_masks_allow_exactly_the_legal_tokens(family):
    """The words of a small language, against a search through all of them."""
    tokenizer = FAMILIES[family]()
    language = [first + second for first in ("the", "b", "to", "") for second in ("{}", "{", "12", "123")]
    matcher = grammars(family).matcher(Constraint(kind="regex", text="(the|b|to|)(\\{\\}|\\{|12|123)"))
    words = TokenTexts(tokenizer)
    spelled = [words.bytes_of(k).decode(errors="replace") for k in range(tokenizer.vocab)]
    source = random.Random(3)
    for _ in range(20):
        walk, text = matcher.fork(), ""
        while not walk.is_done:
            legal = [
                token
                for token, piece in enumerate(spelled)
                if piece and any(word.startswith(text + piece) for word in language)
            ]
            if text in language:
                legal.append(tokenizer.end_of_text)
            # Of tokens that spell the same, one alone may be allowed where the text is forced.
            assert {spelled[token] for token in allowed(walk)} == {spelled[token] for token in legal}, text
            token = source.choice(legal)
            assert walk.advance(token)
            if token == tokenizer.end_of_text:
                break
            text += spelled[token]
        assert text in language


def test_an_illegal_token_changes_nothing():
    tokenizer = byte_level()
    matcher = grammars().matcher(schema(obj(a={"type": "boolean"})))
    before = allowed(matcher)
    wrong = tokenizer.core.token_to_id("a")
    assert wrong not in before
    assert not matcher.advance(wrong)
    assert allowed(matcher) == before
    assert not matcher.advance(tokenizer.end_of_text)
    assert not matcher.is_done
    assert not matcher.may_end


def test_drafts_are_judged_taken_and_taken_back():
    tokenizer = byte_level()
    matcher = grammars().matcher(schema(obj(a={"type": "integer"})))
    draft = [tokenizer.core.token_to_id(char) for char in '{"a":12}']
    wrong = [*draft[:3], draft[0], *draft[3:]]
    assert matcher.legal(draft) == len(draft)
    assert matcher.legal(wrong) == 3
    masks = [allowed(matcher)]
    for token in draft:
        assert matcher.advance(token)
        masks.append(allowed(matcher))
    assert matcher.is_done
    assert allowed(matcher) == [tokenizer.end_of_text]
    for back in range(len(draft)):
        matcher.rollback(1)
        assert not matcher.is_done
        assert allowed(matcher) == masks[len(draft) - 1 - back]
    assert matcher.advance_all(wrong) == 3
    assert allowed(matcher) == masks[3]
    matcher.rollback(3)
    assert allowed(matcher) == masks[0]


def test_a_fork_goes_its_own_way():
    tokenizer = byte_level()
    one = grammars().matcher(Constraint(kind="regex", text="a*b"))
    first = tokenizer.core.token_to_id("a")
    assert one.advance(first)
    other = one.fork()
    assert other.advance(tokenizer.core.token_to_id("b"))
    assert other.is_done
    assert not one.is_done
    assert one.advance(first)


def test_requests_with_one_schema_share_its_compilation_and_no_state(monkeypatch):
    made = Grammars(byte_level())
    constraint = Constraint(kind="regex", text="ab")
    first = made.matcher(constraint)
    assert first.advance(byte_level().core.token_to_id("a"))
    monkeypatch.setattr(grammar, "_grammar", lambda constraint: pytest.fail("compiled again"))
    again = made.matcher(constraint)
    assert allowed(again) != allowed(first)
    monkeypatch.undo()
    monkeypatch.setattr(grammar, "MOST_KEPT", 2)
    for text in ("a", "b", "c"):
        made.matcher(Constraint(kind="regex", text=text))
    assert len(made._kept) == 2


def test_a_model_with_more_tokens_than_its_tokenizer_never_draws_them():
    for family in ("byte_level", "metaspace"):
        tokenizer = FAMILIES[family]()
        made = Grammars(tokenizer, vocab=tokenizer.vocab + 70)
        matcher = made.matcher(Constraint(kind="regex", text="[\\s\\S]*"))
        assert len(matcher.mask()) == (tokenizer.vocab + 70 + 31) // 32
        assert max(allowed(matcher)) < tokenizer.vocab


def test_further_ends_of_text_are_allowed_with_the_first():
    tokenizer = byte_level()
    other = tokenizer.core.token_to_id("<|im_end|>")
    matcher = Grammars(tokenizer, ends=[other]).matcher(Constraint(kind="regex", text="a?"))
    assert {tokenizer.end_of_text, other} <= set(allowed(matcher))
    assert matcher.advance(other)


def test_a_json_object_is_any_object():
    tokenizer = llama()
    for seed in range(5):
        matcher = grammars("llama").matcher(Constraint(kind="json_object"))
        text = tokenizer.decode(draw(matcher, tokenizer, random.Random(seed)))
        assert isinstance(json.loads(text), dict)


def test_a_lark_grammar_is_kept_to():
    tokenizer = byte_level()
    constraint = Constraint(kind="lark", text='start: item (", " item)*\nitem: /[ab]{2}/ | "{" item "}"\n')
    text = tokenizer.decode(draw(grammars().matcher(constraint), tokenizer, random.Random(1)))
    assert re.fullmatch(r"[ab{}, ]+", text)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", "{", "json_schema is no JSON"),
        ("json_schema", "3", "json_schema is of type int"),
        ("json_schema", "[" * 100_000, "json_schema is no JSON"),
        ("json_schema", '{"a":' * 300 + "1" + "}" * 300, "recursion"),
        ("json_schema", '{"type": "foo"}', "Invalid type"),
        ("json_schema", '{"$ref": "http://example.com/s"}', "json_schema cannot be used"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", " " * 300_000, "300000 characters; give at most 262144"),
        ("json_schema", '{"type": "string", "pattern": "("}', "json_schema cannot be used"),
        ("json_schema", "false", "json_schema cannot be used"),
        ("regex", "(", "unclosed group"),
        ("regex", "a\\", "ends with a backslash that escapes nothing"),
        ("regex", "a(?=b)", "regex cannot be used"),
        ("regex", "(a{1000}){1000}", "too many expressions"),
        ("regex", "(((a{99}){99}){99}){99}", "regex cannot be used"),
        ("lark", "start: x", "unknown name"),
        ("lark", "", "lark cannot be used"),
        ("lark", "start: X\nX: /(.*a.{50})*/ & /(.*b.{60})*/ & /(.*c.{70})*/", "too many expressions"),
    ],
)
def test_bad_and_exploding_grammars_are_refused_in_a_line(kind, text, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        grammars().matcher(Constraint(kind=kind, text=text))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_schema_that_multiplies_is_refused():
    told = {"allOf": [{"anyOf": [{"required": [f"p{k}"]}, {"required": [f"q{k}"]}]} for k in range(25)]}
    with pytest.raises(ConfigError, match="too large"):
        grammars().matcher(schema(told))
