"""Passages: long texts cut where the tokens of the parts equal those of the whole.

A text may be a file of one line, so it is never in memory as a whole: it comes in parts of any size, and the cuts
depend on its characters alone, not on the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PASSAGE_CHARS = 1 << 16
"""Minimum length of a passage, except for a document's last: enough to divide the work."""

SLACK_CHARS = 1 << 18
"""Distance beyond that in which a cut is searched."""

# The patterns that cut text into words for byte-level BPE (GPT-2's, Llama 3's, Qwen's) all end a word at such a place,
# whether the text goes on or not. In the order of preference: a line that starts without blanks; a single blank between
# two words; in text without blanks, a digit or a mark after a letter.
_WORD_ENDS = (
    re.compile(r"(?<=\S\n)(?=[^\s/])"),
    re.compile(r"(?<=\S)(?= \S)"),
    re.compile(
        r"(?<=[A-Za-z])(?=[0-9!-&(-/:-@\[-`{-~])"
        r"|(?<=[^\W\d_])(?=[\u3001-\u3003\u300a-\u3011\uff01-\uff0f\uff1a-\uff20])"
    ),
)

LONG_RUN = 1024
"""Characters without a blank, or blanks alone, beyond normal language: data, or text written without blanks."""

_LONG_RUN = re.compile(rf"\S{{{LONG_RUN},}}|\s{{{LONG_RUN},}}")
_RUN_PART, _RUN_STRIDE = 64, 256


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A part of a document.

    Attributes:
        is_last: whether the document ends with it.
    """

    text: str
    is_last: bool


def passages(parts: Iterable[DocumentPart], chars: int, slack: int = SLACK_CHARS) -> Iterator[DocumentPart]:
    """The documents in passages of ``chars`` to ``chars + slack`` characters; a document's last may be shorter.

    Under byte-level BPE the passages have the ids of the whole, unless no word ends for ``slack`` characters: there the
    cut goes through a word. A tokenizer that adds a blank at the start of a text (Llama 2) adds one at the start of
    each passage.
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
    """A cut between two places, of which at least the second lies within the text."""
    matches = (pattern.search(text, first, last + 1) for pattern in _WORD_ENDS)
    return next((match.start() for match in matches if match), last)


def spread_sample(texts: Iterable[str], chars: int) -> list[str]:
    """Every k-th of the texts, for the smallest power of two k that keeps to ``chars`` characters.

    One pass, with never more than ``chars`` and a text in memory: when full, every second one is dropped.
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
    """The texts for training a tokenizer; of long runs a quarter, in short parts.

    Learning merges reads a whole word again for each of its merged pairs: a word of a megabyte takes hours. And words
    that all differ take a hundred bytes of memory for each of their characters.
    """
    for text in texts:
        start = 0
        for run in _LONG_RUN.finditer(text):
            yield text[start : run.start()]
            yield from (text[part : part + _RUN_PART] for part in range(run.start(), run.end(), _RUN_STRIDE))
            start = run.end()
        yield text[start:]
