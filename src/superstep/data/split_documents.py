"""Passages: long documents, cut so that the passages have the same tokens as the whole document.

A document may be a large file of one line, so it is never in memory as a whole: it is read in parts of any size. The
cuts depend on its characters alone, not on these parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PASSAGE_CHARS = 1 << 16
"""Minimum length of a passage; the last one of a document may be shorter."""

SLACK_CHARS = 1 << 18
"""A cut is searched in this many characters after the minimum length."""

# Byte-level BPE first cuts text into words by a pattern. The patterns of GPT-2, Llama 3 and Qwen all end a word at
# these places, whatever text follows. In the order of preference: before a line that starts without blanks; before a
# single blank between two words; in text without blanks, between a letter and a digit or a mark.
_WORD_ENDS = (
    re.compile(r"(?<=\S\n)(?=[^\s/])"),
    re.compile(r"(?<=\S)(?= \S)"),
    re.compile(
        r"(?<=[A-Za-z])(?=[0-9!-&(-/:-@\[-`{-~])"
        r"|(?<=[^\W\d_])(?=[\u3001-\u3003\u300a-\u3011\uff01-\uff0f\uff1a-\uff20])"
    ),
)

LONG_RUN = 1024
"""So many characters without a blank, or blanks alone, are not normal language: data, or a script without blanks."""

_LONG_RUN = re.compile(rf"\S{{{LONG_RUN},}}|\s{{{LONG_RUN},}}")
_RUN_PART, _RUN_STRIDE = 64, 256


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A part of a document.

    Attributes:
        is_last: whether the document ends with this part.
    """

    text: str
    is_last: bool


def passages(parts: Iterable[DocumentPart], chars: int, slack: int = SLACK_CHARS) -> Iterator[DocumentPart]:
    """The documents in passages of ``chars`` to ``chars + slack`` characters; a document's last one may be shorter.

    Under byte-level BPE the passages have the token ids of the whole document. The exception: where no word ends within
    ``slack`` characters, the cut goes through a word. A tokenizer that adds a blank at the start of a text (Llama 2)
    adds one at the start of each passage.
    """
    text = ""
    for part in parts:
        text += part.text
        start = 0
        while len(text) - start > chars + slack:
            cut = _cut(text, start + chars, start + chars + slack)
            yield DocumentPart(text[start:cut], is_last=False)
            start = cut
        text = text[start:]
        if part.is_last:
            yield DocumentPart(text, is_last=True)
            text = ""


def _cut(text: str, first: int, last: int) -> int:
    """The best index to cut at, from ``first`` to ``last``; ``last`` if no word ends there."""
    matches = (pattern.search(text, first, last + 1) for pattern in _WORD_ENDS)
    return next((match.start() for match in matches if match), last)


def spread_sample(texts: Iterable[str], chars: int) -> list[str]:
    """Every k-th text, where k is the smallest power of two that gives at most ``chars`` characters.

    It takes one pass. Whenever the sample is larger than ``chars``, every second text is dropped, so memory never holds
    more than ``chars`` characters and one text.
    """
    kept: list[str] = []
    kept_chars, stride = 0, 1
    for number, text in enumerate(texts):
        if number % stride:
            continue
        kept.append(text)
        kept_chars += len(text)
        while kept_chars > chars and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            kept_chars = sum(map(len, kept))
    return kept


def short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts to train a tokenizer on. A run of ``LONG_RUN`` characters gives a quarter of them, in short parts.

    The training reads a word again for each pair that it merges there, so a word of a megabyte takes hours. Words that
    all differ take a hundred bytes of memory for each of their characters.
    """
    for text in texts:
        start = 0
        for run in _LONG_RUN.finditer(text):
            yield text[start : run.start()]
            yield from (text[part : part + _RUN_PART] for part in range(run.start(), run.end(), _RUN_STRIDE))
            start = run.end()
        yield text[start:]
