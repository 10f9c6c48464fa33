"""Stop texts are found however the text is cut, and nothing of them is given out."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spellings import FAMILIES, byte_level
from superstep.errors import ConfigError
from superstep.serve.text.answer_reader import AnswerReader
from superstep.serve.text.detokenize import TokenTexts
from superstep.serve.text.stop_strings import StopFinder, check_stops

letters = st.text(alphabet="ab", max_size=24)
stop_texts = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def search(text, stops, *, include_stop=False):
    """A whole text looked through from its start: what is given out, and the stop text."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def cut(text, cuts):
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[a:b] for a, b in pairwise(places)]


@settings(max_examples=600)
@given(letters, stop_texts, st.lists(st.integers(0, 24)), st.booleans())
def test_any_cut_finds_what_a_search_of_the_whole_finds(text, stops, cuts, include_stop):
    finder = StopFinder(stops, include_stop=include_stop)
    given_out, stop = "", None
    for piece in cut(text, cuts):
        found = finder.push(piece)
        given_out, stop = given_out + found.text, found.stop
        if stop:
            break
    given_out += finder.end().text
    assert (given_out, stop) == search(text, stops, include_stop=include_stop)


@settings(max_examples=300)
@given(letters, stop_texts)
def test_what_may_become_a_stop_text_is_held_and_nothing_else(text, stops):
    finder = StopFinder(stops)
    given_out = ""
    for n, char in enumerate(text, 1):
        found = finder.push(char)
        given_out += found.text
        if found.stop:
            break
        held = text[len(given_out) : n]
        longest = max((k for stop in stops for k in range(len(stop)) if text[:n].endswith(stop[:k])), default=0)
        assert held == text[n - longest : n]


def test_the_longest_of_those_that_end_together_counts():
    assert search("xabc", ["bc", "abc"]) == ("x", "abc")
    found = StopFinder(["bc", "abc"]).push("xabcd")
    assert (found.text, found.stop) == ("x", "abc")


def test_stop_texts_that_cannot_be_looked_for_are_refused():
    check_stops(["\n", "x" * 1000])
    with pytest.raises(ConfigError, match="stop has 33 texts; give at most 32"):
        check_stops(["a"] * 33)
    with pytest.raises(ConfigError, match="empty text"):
        check_stops(["a", ""])
    with pytest.raises(ConfigError, match="1001 characters; give at most 1000"):
        check_stops(["a" * 1001])


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=30)
@given(data=st.data())
def test_a_reader_gives_out_the_text_up_to_the_first_stop(family, data):
    tokenizer = FAMILIES[family]()
    words = TokenTexts(tokenizer)
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab - 1), max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="the one<0123\ufffd ", min_size=1, max_size=3), max_size=3))
    reader = AnswerReader(words, stops)
    news = []
    for token in tokens:
        news.append(reader.push(token))
        if reader.stop:
            break
    pushed = len(news)
    news.append(reader.end())
    assert ("".join(piece.text for piece in news), reader.stop) == search(tokenizer.decode(tokens), stops)
    assert sum(piece.tokens for piece in news) == pushed


def test_a_stop_text_is_found_across_tokens_of_cut_characters():
    tokenizer = byte_level()
    reader = AnswerReader(TokenTexts(tokenizer), ["日本"])
    text = ""
    for token in tokenizer.encode("the 日日本 cat"):
        text += reader.push(token).text
        if reader.stop:
            break
    assert (text, reader.stop) == ("the 日", "日本")
    assert reader.end().text == ""
