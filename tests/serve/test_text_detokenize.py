"""The pieces of an answer, joined, are the tokenizer's own text, and no broken character is ever among them."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spellings import FAMILIES, byte_level, llama
from superstep.serve.text.detokenize import Detokenizer, TokenTexts

WORDS = {name: TokenTexts(make()) for name, make in FAMILIES.items()}
STREAMING = sorted(set(FAMILIES) - {"word_piece"})

drawn = st.data()


def read(words, tokens, **how):
    detokenizer = Detokenizer(words, **how)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.end()]


def ids(tokenizer, *, slack=3):
    """Token ids, those of bytes more often than of anything else, and some that nobody knows."""
    return st.lists(st.one_of(st.integers(0, 256), st.integers(0, tokenizer.vocab + slack)), max_size=40)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=80)
@given(data=drawn)
def test_joined_pieces_are_the_whole_text(family, data):
    tokenizer = FAMILIES[family]()
    tokens = data.draw(ids(tokenizer))
    pieces = read(WORDS[family], tokens)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens)
    assert sum(piece.tokens for piece in pieces) == len(tokens)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=40)
@given(data=drawn)
def test_special_tokens_can_be_left_out(family, data):
    tokenizer = FAMILIES[family]()
    special = sorted(tokenizer.core.get_added_tokens_decoder())
    tokens = data.draw(st.lists(st.one_of(st.sampled_from(special), st.integers(0, tokenizer.vocab - 1)), max_size=20))
    text = "".join(piece.text for piece in read(WORDS[family], tokens, skip_special=True))
    assert text == tokenizer.core.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("family", [name for name in STREAMING if name not in ("undecoded", "stripping")])
@settings(max_examples=40)
@given(text=st.text(alphabet=st.sampled_from("the ab日本🙂é{}"), max_size=30))
@example(text="日本🙂")
def test_good_text_never_shows_a_broken_character(family, text):
    tokenizer = FAMILIES[family]()
    tokens = tokenizer.encode(text)
    if "\ufffd" not in tokenizer.decode(tokens):
        assert not any("\ufffd" in piece.text for piece in read(WORDS[family], tokens))


@pytest.mark.parametrize("family", STREAMING)
def test_text_comes_as_soon_as_it_is_certain(family):
    tokenizer = FAMILIES[family]()
    plain = "one two" if family == "undecoded" else "the the the"
    tokens = tokenizer.encode(plain)
    detokenizer = Detokenizer(WORDS[family])
    for n, token in enumerate(tokens, 1):
        piece = detokenizer.push(token)
        assert piece.text in ("", tokenizer.decode(tokens[:n]).removeprefix(tokenizer.decode(tokens[: n - 1])))
    assert detokenizer.end().text == ""


def test_a_cut_character_waits_and_is_covered_by_both_its_tokens():
    tokenizer = byte_level()
    table = {name: token for token, name in enumerate(WORDS["byte_level"]._names)}
    tokens = [table["a"], table["ð"], table["Ł"], table["ĺ"], table["Ķ"], table["ð"]]
    pieces = read(WORDS["byte_level"], tokens)
    assert [(piece.text, piece.tokens) for piece in pieces] == [
        ("a", 1),
        ("", 0),
        ("", 0),
        ("", 0),
        (bytes([0xF0, 0x9F, 0x98, 0x94]).decode(), 4),
        ("", 0),
        ("\ufffd", 1),
    ]
    assert tokenizer.decode(tokens) == "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("family", ["byte_level", "llama", "metaspace"])
def test_work_for_a_token_does_not_grow_with_the_answer(family, monkeypatch):
    tokenizer = FAMILIES[family]()
    detokenizer = Detokenizer(WORDS[family])
    tokens = tokenizer.encode("the the 日本 {}") * 200
    for token in tokens:
        detokenizer.push(token)
        held = sum(len(str(vars(step))) for step in detokenizer._chain)
        assert held < 500, "a step keeps what it has given out"


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"word_piece"}))
@settings(max_examples=50)
@given(data=drawn)
def test_a_text_amid_others_is_what_it_adds_to_them(family, data):
    tokenizer = FAMILIES[family]()
    before = [tokenizer.core.token_to_id("<|im_end|>")]
    tokens = data.draw(ids(tokenizer))
    text = "".join(piece.text for piece in read(WORDS[family], tokens, is_amid=True))
    assert tokenizer.decode(before) + text == tokenizer.decode(before + tokens)


def test_the_space_before_a_completion_is_kept():
    tokens = llama().encode("the")
    assert llama().decode(tokens) == "the"
    assert "".join(piece.text for piece in read(WORDS["llama"], tokens, is_amid=True)) == " the"
    joined = [WORDS["word_piece"], FAMILIES["word_piece"]().encode("b")]
    assert "".join(piece.text for piece in read(*joined, is_amid=True)).strip()


def test_bytes_of_a_token_are_those_in_a_text():
    words = WORDS["byte_level"]
    tokenizer = byte_level()
    tokens = tokenizer.encode("the cat 日本 🙂 é\n")
    assert b"".join(map(words.bytes_of, tokens)).decode() == "the cat 日本 🙂 é\n"
    spaced = llama()
    words = WORDS["llama"]
    tokens = spaced.encode("the 日é~\n🙂")
    assert b"".join(map(words.bytes_of, tokens)).decode() == " the 日é~\n🙂"
    assert words.bytes_of(spaced.vocab + 5) == b""
    assert words.bytes_of(-1) == b""


def test_special_tokens_are_known():
    words = WORDS["llama"]
    assert words.is_special(llama().end_of_text)
    assert not words.is_special(llama().core.token_to_id("<tool_call>"))
