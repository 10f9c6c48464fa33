"""Incremental detokenization: the joined pieces of an answer equal the tokenizer's text of all its tokens.

Characters that span tokens wait until they are complete. The work for a token does not grow with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from superstep.data.tokenizer import Tokenizer
from superstep.serve.text.incremental_decoders import BYTE, IncrementalDecoder, byte_level, end_of, push_through, steps

BEFORE = "."
"""A placeholder for preceding text: no decoder changes it."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is certain.

    Attributes:
        text: may be empty.
        tokens: number of tokens since the piece before; 0 while they wait.
    """

    text: str = ""
    tokens: int = 0


class TokenTexts:
    """Spellings of a tokenizer's tokens, read once for all answers.

    Args:
        tokenizer: of the model.
        shown: spellings of special tokens that are shown even where special tokens are skipped: marks of tool calls.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[str] = ()) -> None:
        core = tokenizer.core
        decoder = json.loads(core.to_str())["decoder"]
        self._names = [core.id_to_token(token) for token in range(tokenizer.vocab)]
        self._special = frozenset(token for token, added in core.get_added_tokens_decoder().items() if added.special)
        self._skipped = frozenset(token for token in self._special if self._names[token] not in shown)
        self._is_byte_level = '"ByteLevel"' in json.dumps(decoder)
        self._has_bytes = '"ByteFallback"' in json.dumps(decoder)
        self.fresh_steps: Callable[[], list[IncrementalDecoder]] = steps(
            decoder, lambda tokens: core.decoder.decode(tokens)
        )

    def name(self, token: int, *, skip_special: bool = False) -> str | None:
        """A token's spelling in the vocabulary; None for one without text: unknown, or special and skipped."""
        if not 0 <= token < len(self._names) or (skip_special and token in self._skipped):
            return None
        return self._names[token]

    def is_special(self, token: int) -> bool:
        """Whether a token is a special one, such as the end of text."""
        return token in self._special

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of the longest token: a text with more than ``n`` times as many has more than ``n`` tokens."""
        return max(len(self.bytes_of(token)) for token in range(len(self._names)))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token inside a text: possibly a part of a character, or a word with the space before it."""
        name = self.name(token)
        if name is None:
            return b""
        if self._is_byte_level:
            return byte_level(name)
        byte = BYTE.fullmatch(name)
        if byte and self._has_bytes:
            return bytes([int(byte[1], 16)])
        return self._amid(name).encode()

    def _amid(self, name: str) -> str:
        """A token's text after another token."""
        chain = self.fresh_steps()
        text = push_through(chain, [BEFORE, name]) + end_of(chain)
        return text.removeprefix(BEFORE)


class Detokenizer:
    """The text of one answer. Not thread-safe.

    Args:
        words: of the tokenizer.
        skip_special: whether special tokens are left out, rather than spelled.
        is_amid: whether the text follows another one, such as a prompt. Then its first token keeps its leading space,
            which SentencePiece's decoders strip at the start of a text.
    """

    def __init__(self, words: TokenTexts, *, skip_special: bool = False, is_amid: bool = False) -> None:
        self._words = words
        self._skip_special = skip_special
        self._chain = words.fresh_steps()
        self._waiting = 0
        self._before = BEFORE if is_amid else ""
        if is_amid:
            self._before = self._before.removeprefix(push_through(self._chain, [BEFORE]))

    def push(self, token: int) -> TextDelta:
        """The new certain text, which may be empty."""
        self._waiting += 1
        name = self._words.name(token, skip_special=self._skip_special)
        if name is None:
            return TextDelta()
        return self._piece(push_through(self._chain, [name]))

    def end(self) -> TextDelta:
        """The remaining text after the last token; broken characters become U+FFFD."""
        text = end_of(self._chain).removeprefix(self._before)
        tokens, self._waiting = self._waiting, 0
        return TextDelta(text, tokens)

    def _piece(self, text: str) -> TextDelta:
        if not text:
            return TextDelta()
        tokens, self._waiting = self._waiting, 0
        return TextDelta(text, tokens)
