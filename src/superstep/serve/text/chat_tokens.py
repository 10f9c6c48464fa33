"""Chats made into token ids: the template's control tokens are tokens, and what a client wrote never is.

A message that spells ``<|im_end|>`` is encoded as those characters, so nobody can end their message and speak as the
system. A template's control tokens are the special ones of the tokenizer, and those added tokens that it spells itself.
"""

from __future__ import annotations

import tokenizers

from superstep.data.tokenizer import Tokenizer
from superstep.serve.text.chat import Chat, ChatTemplate


class ChatEncoder:
    """Makes prompts of chats. May be shared by threads.

    Args:
        template: of the model.
        tokenizer: of the model.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        added = tokenizer.core.get_added_tokens_decoder().values()
        self.template = template
        self._tokenizer = tokenizer
        self._control = tuple(token.content for token in added if token.special)
        self._added = tuple(token.content for token in added if not token.special)
        self._core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
        self._core.encode_special_tokens = False
        self._newline = self._encode("\n", is_plain=False)

    def tokens(self, chat: Chat) -> list[int]:
        """The ids of a prompt.

        Raises:
            ConfigError: for messages that cannot be, or a template that refuses them, is broken, or asks for too much.
        """
        text, marks = self.template.render_marked(chat, self._control, self._added)
        ids: list[int] = []
        for part, is_marked in marks.split(text):
            if not part:
                continue
            # An added token that is not special is found in any text, but not in halves of its spelling.
            halves = (part[:1], part[1:]) if is_marked and part in self._added else (part,)
            for half in halves:
                ids += self._encode_amid(half, is_plain=is_marked) if ids else self._encode(half, is_plain=is_marked)
        return ids

    def _encode_amid(self, text: str, *, is_plain: bool) -> list[int]:
        """The ids of a text that others precede: after a newline no tokenizer puts a space before it."""
        ids = self._encode("\n" + text, is_plain=is_plain)
        size = len(self._newline)
        return ids[size:] if ids[:size] == self._newline else self._encode(text, is_plain=is_plain)

    def _encode(self, text: str, *, is_plain: bool) -> list[int]:
        if is_plain:
            return self._tokenizer.encode(text)
        return self._core.encode(text, add_special_tokens=False).ids
