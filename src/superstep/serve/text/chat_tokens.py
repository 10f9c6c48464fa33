"""Chats to token ids: the template's control tokens become tokens, and a client's text never does.

A message that spells ``<|im_end|>`` is encoded as those characters, so that no client can end a message and speak as
the system. A template's control tokens are the tokenizer's special ones, and those added tokens that it spells itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import tokenizers

from superstep.data.tokenizer import Tokenizer
from superstep.errors import ConfigError
from superstep.serve.text.chat_template import Chat, ChatPrefix, ChatTemplate
from superstep.serve.text.control_token_guard import Marks

Part = tuple[list[int], bool]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A suffix of a prompt: its text and ids."""

    text: str
    ids: tuple[int, ...]


class ChatEncoder:
    """Encodes chats as prompts. Thread-safe.

    Args:
        template: of the model.
        tokenizer: of the model.

    Attributes:
        template: the argument.
        special: ids of the tokenizer's special tokens.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        added = tokenizer.core.get_added_tokens_decoder().values()
        self.template = template
        self._tokenizer = tokenizer
        self._control = tuple(token.content for token in added if token.special)
        self._added = tuple(token.content for token in added if not token.special)
        self._core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
        self._core.encode_special_tokens = False
        self.special = frozenset(
            id_ for id_, token in tokenizer.core.get_added_tokens_decoder().items() if token.special
        )
        self._newline = self._encode("\n", is_plain=False)

    def tokens(self, chat: Chat, most_bytes: int | None = None) -> list[int]:
        """The ids of a prompt.

        Args:
            chat: the chat.
            most_bytes: of its text; None for any number. A tokenizer takes about a second for a megabyte.

        Raises:
            ConfigError: messages are invalid, the template refuses them or fails, or it exceeds its limits.
        """
        text, marks = self.template.render_marked(chat, self._control, self._added)
        if most_bytes is not None and (size := len(text.encode())) > most_bytes:
            raise ConfigError(
                f"messages are a prompt of {size} bytes; {most_bytes} are the most that the context can hold."
            )
        return [id_ for ids, _ in self._parts(text, marks, is_amid=False) for id_ in ids]

    def behind(self, chat: Chat, before: str = "") -> PromptPiece | None:
        """The part of a prompt after a text with known ids; None where the prompt does not begin with that text.

        Raises:
            ConfigError: as ``tokens``.
        """
        text, marks = self.template.render_marked(chat, self._control, self._added)
        pieces, rest, left = list(marks.split(text)), [], len(before)
        shown = "".join(piece for piece, _ in pieces)
        if not shown.startswith(before):
            return None
        for piece, is_marked in pieces:
            rest.append((piece[left:], is_marked))
            left = max(0, left - len(piece))
        parts = self._encode_pieces(rest, is_amid=bool(before))
        return PromptPiece(shown[len(before) :], tuple(id_ for ids, _ in parts for id_ in ids))

    def turns(self, chats: Sequence[tuple[Chat, Sequence[ChatPrefix]]]) -> list[tuple[list[str], Marks]]:
        """The texts of each chat's prefixes, all with the same marks; raises as ``tokens`` does."""
        return self.template.render_many(chats, self._control, self._added)

    def parts(self, texts: Sequence[str], marks: Marks) -> list[list[Part]]:
        """The ids of consecutive texts, each encoded without the next one.

        Returns:
            For each text its parts: their ids, and whether the client wrote them like a control token.
        """
        parts: list[list[Part]] = []
        is_amid = False
        for text in texts:
            parts.append(list(self._parts(text, marks, is_amid=is_amid)))
            is_amid = is_amid or bool(parts[-1])
        return parts

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of consecutive texts without a template."""
        ids: list[list[int]] = []
        for text in texts:
            ids.append((self._encode_amid if any(ids) else self._encode)(text, is_plain=True))
        return ids

    def _parts(self, text: str, marks: Marks, *, is_amid: bool) -> Iterator[Part]:
        return self._encode_pieces(marks.split(text), is_amid=is_amid)

    def _encode_pieces(self, pieces: Iterable[tuple[str, bool]], *, is_amid: bool) -> Iterator[Part]:
        for part, is_marked in pieces:
            # A tokenizer finds an added token that is not special in any text, but not in halves of its spelling.
            halves = (part[:1], part[1:]) if is_marked and part in self._added else (part,)
            for half in filter(None, halves):
                ids = (self._encode_amid if is_amid else self._encode)(half, is_plain=is_marked)
                is_amid = is_amid or bool(ids)
                yield ids, is_marked

    def _encode_amid(self, text: str, *, is_plain: bool) -> list[int]:
        """The ids of a text that follows another: after a newline no tokenizer puts a space before it."""
        ids = self._encode("\n" + text, is_plain=is_plain)
        size = len(self._newline)
        return ids[size:] if ids[:size] == self._newline else self._encode(text, is_plain=is_plain)

    def _encode(self, text: str, *, is_plain: bool) -> list[int]:
        if is_plain:
            return self._tokenizer.encode(text)
        return self._core.encode(text, add_special_tokens=False).ids
