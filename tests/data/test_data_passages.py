"""Passages are the text, have its tokens, and do not depend on how the text came."""

import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from superstep.data.split_documents import LONG_RUN, DocumentPart, passages, short_words
from superstep.data.tokenizer import train_tokenizer

TEXT = [
    "def add(a, b):\n    return a + b\n\n\nclass Adder:\n    pass\n" * 20,
    "the cat's 123 mats. " * 30,
    *["a\n\n", "a\r\n", "a \n"] * 90,  # blanks that end a text are one word: a wrong cut would show
]
GPT2 = train_tokenizer(TEXT, 290).core

# Whose words are joined the most: a mark before a word, three digits, blanks and ends of lines after marks.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(pattern):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False))
    return core


CORES = (GPT2, trained(LLAMA3))

texts = st.text(
    alphabet=st.one_of(st.sampled_from("abS'.,/12 \n\r\t\x85\u3000é²ⅷ中。🙂<|"), st.characters(codec="utf-8"))
)


def parts(text, sizes):
    """The text as one document, in parts of these sizes, and the rest."""
    start = 0
    for size in sizes:
        if start + size < len(text):
            yield DocumentPart(text[start : start + size], is_last=False)
            start += size
    yield DocumentPart(text[start:], is_last=True)


@settings(max_examples=300)
@given(texts, st.lists(st.integers(1, 9)), st.integers(2, 6), st.integers(0, 9))
def test_passages_are_the_text_however_it_comes(text, sizes, chars, slack):
    cut = list(passages(parts(text, sizes), chars, slack))
    assert "".join(part.text for part in cut) == text
    assert [part.is_last for part in cut] == [False] * (len(cut) - 1) + [True]
    assert all(chars <= len(part.text) <= chars + slack for part in cut[:-1])
    assert len(cut[-1].text) <= chars + slack
    assert cut == list(passages(parts(text, []), chars, slack))


@settings(max_examples=500)
@given(texts, st.integers(2, 6), st.integers(3, 30))
def test_passages_have_the_tokens_of_the_whole(text, chars, slack):
    cut = [part.text for part in passages(parts(text, []), chars, slack)]
    assume(all(len(part) < chars + slack for part in cut[:-1]))  # else a word may have been cut
    for core in CORES:
        assert [token for part in cut for token in core.encode(part).ids] == core.encode(text).ids


def test_documents_stay_apart():
    both = [*parts("one two three four five", [4]), *parts("six", [])]
    cut = list(passages(both, 3, 3))
    assert "".join(part.text + "|" * part.is_last for part in cut) == "one two three four five|six|"


def test_text_without_line_ends_is_cut_between_words_and_text_without_blanks_after_letters():
    assert [part.text for part in passages(parts("ab cd ef gh", []), 3, 4)] == ["ab cd", " ef gh"]
    assert [part.text for part in passages(parts("abcd1ef,gh3ij", []), 3, 4)] == ["abcd", "1ef", ",gh3ij"]
    assert [part.text for part in passages(parts("中文中文。中文中文", []), 3, 4)] == ["中文中文", "。中文中文"]
    assert [part.text for part in passages(parts("a" * 20, []), 3, 4)] == ["a" * 7, "a" * 7, "a" * 6]


def test_only_long_runs_are_cut_for_training():
    normal = "x" * (LONG_RUN - 1) + " word " * 100
    assert list(short_words([normal])) == [normal]
    long = f"start {'x' * 2000} middle {' ' * 2000}end"
    cut = list(short_words([long]))
    assert [cut[0], cut[9], cut[-1]] == ["start ", " middle", "end"]
    assert "".join(cut).count("x") == 8 * 64
    assert max(len(word) for part in cut for word in re.findall(r"\S+|\s+", part)) <= 64
