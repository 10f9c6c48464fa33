"""The text part of one model, for the HTTP interface, and its grammars, for the engine.

``TextBackend`` is the ``TokenTexts`` of ``api/words.py``; ``make_matchers`` returns the ``Matchers`` of ``engine.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from superstep.data.tokenizer import Tokenizer, load_tokenizer
from superstep.serve.api.text_protocol import AnswerPiece, Json, ToolUse
from superstep.serve.build_engine import ends_of_text
from superstep.serve.scheduling.request import Constraint, Request
from superstep.serve.text import answer_reader as reader
from superstep.serve.text.chat_template import Chat, ChatTemplate, load_chat_template
from superstep.serve.text.chat_tokens import ChatEncoder
from superstep.serve.text.detokenize import TokenTexts
from superstep.serve.text.grammar import GrammarMatcher, Grammars
from superstep.serve.text.stop_strings import check_stops
from superstep.serve.text.tool_call_parser import OPENERS, CallParser, Delta, form_of
from superstep.serve.text.tool_choice import tool_constraint


class TextBackend:
    """Text of one model.

    Args:
        tokenizer: of the model.
        template: of its chats.
        grammars: of its tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._encoder = ChatEncoder(template, tokenizer)
        self._grammars = grammars
        self._form = form_of(template.source(has_tools=True))
        self._words = TokenTexts(tokenizer, shown=[OPENERS[self._form]] if self._form else [])

    @property
    def chat_stops(self) -> Sequence[str]:
        """Texts that end an answer in a chat, if the template has no token for it."""
        return self._encoder.template.stops

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text. No spelling in it becomes a special token."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; a special token's spelling."""
        return self._words.bytes_of(token)

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text with more than ``n`` times as many has more than ``n`` tokens."""
        return self._words.longest_bytes

    def chat(self, messages: Sequence[Json], tools: Sequence[Json], most_bytes: int | None = None) -> Sequence[int]:
        """The prompt of a conversation, up to the start of the assistant's answer.

        Raises:
            ConfigError: a message is malformed, the template refuses it, or its text has more bytes than
                ``most_bytes``; names the field.
        """
        return self._encoder.tokens(Chat(messages=messages, tools=tools), most_bytes)

    def reader(self, stop: Sequence[str], *, shows_special: bool = False) -> TextReader:
        """A reader of one answer that ends at the first stop text; special tokens are spelled out, or left out.

        Raises:
            ConfigError: a stop text is invalid.
        """
        check_stops(stop)
        return TextReader(reader.AnswerReader(self._words, stop, skip_special=not shows_special))

    def tool_reader(self, use: ToolUse) -> ToolReader:
        """A parser of the tool calls in one answer; it finds none if the model's template has no known format."""
        names = [tool["function"]["name"] for tool in use.tools]
        return ToolReader(CallParser(self._form, names) if self._form else None)

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """The grammar of an answer that must contain a call; None without that.

        Raises:
            ConfigError: the tools are invalid, or the model has no known format of calls.
        """
        choice: str | Json = "required" if use.is_required else "auto"
        if use.only:
            choice = {"type": "function", "function": {"name": use.only}}
        return tool_constraint(use.tools, choice, self._form, self._tokenizer, is_parallel=use.is_parallel)

    def check_constraint(self, constraint: Constraint) -> None:
        """Compile a constraint, as the engine will.

        Raises:
            ConfigError: it is malformed, too large, or matches nothing.
        """
        self._grammars.matcher(constraint)


class TextReader:
    """Reads one answer: tokens in, text out."""

    def __init__(self, core: reader.AnswerReader) -> None:
        self._core = core

    @property
    def stop(self) -> str | None:
        """The stop text of the answer; no text comes after it."""
        return self._core.stop

    def push(self, token: int) -> str:
        """The new certain text."""
        return self._core.push(token).text

    def end(self) -> str:
        """The remaining text after the last token."""
        return self._core.end().text


class ToolReader:
    """Finds the tool calls in the text of one answer."""

    def __init__(self, parser: CallParser | None) -> None:
        self._parser = parser
        self._calls = 0

    def push(self, text: str) -> Sequence[AnswerPiece]:
        """The new certain content."""
        return self._read(self._parser.push(text) if self._parser else Delta(text))

    def end(self) -> Sequence[AnswerPiece]:
        """The remaining content after the last text."""
        return self._read(self._parser.end() if self._parser else Delta())

    def _read(self, delta: Delta) -> Sequence[AnswerPiece]:
        pieces = [AnswerPiece(content=delta.text)] if delta.text else []
        for call in delta.calls:
            pieces.append(AnswerPiece(call=self._calls, name=call.name, arguments=call.arguments))
            self._calls += 1
        return pieces


class AnswerForm:
    """The engine's matcher of one answer.

    Args:
        core: at the start of an answer.
        vocab: of the model.
    """

    def __init__(self, core: GrammarMatcher, vocab: int) -> None:
        self._core = core
        self._vocab = vocab

    @property
    def is_done(self) -> bool:
        """Whether the answer must end here."""
        return self._core.is_done

    def compute_mask(self) -> torch.Tensor:
        """The mask of allowed next tokens: bool [V]."""
        bits = np.unpackbits(self._core.mask().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocab].astype(np.bool_))

    def advance(self, token: int) -> None:
        """Advance by an allowed token."""
        is_legal = self._core.advance(token)
        assert is_legal, f"token {token} was drawn and is not allowed"

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of some draft tokens, from the first on, are allowed; the state does not change."""
        # On a copy: a draft that exceeds the grammar's limits must not end the answer.
        return self._core.fork().legal(tokens)

    def fork(self) -> AnswerForm:
        """An independent copy with the same state."""
        return AnswerForm(self._core.fork(), self._vocab)


def make_matchers(grammars: Grammars, vocab: int) -> Callable[[Request], AnswerForm | None]:
    """A function that makes the matcher of each request's answer; None without a grammar.

    Args:
        grammars: of the tokenizer.
        vocab: of the model.
    """

    def matcher(request: Request) -> AnswerForm | None:
        constraint = request.sampling.constraint
        return None if constraint is None else AnswerForm(grammars.matcher(constraint), vocab)

    return matcher


def load_words(folder: Path, vocab: int) -> TextBackend:
    """The text part of a folder's model.

    Raises:
        DataError: it has no readable tokenizer.
        ConfigError: its chat template cannot be used.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    grammars = Grammars(tokenizer, vocab=vocab, ends=ends_of_text(folder))
    return TextBackend(tokenizer, load_chat_template(folder), grammars)


def forms_of(folder: Path, vocab: int) -> Callable[[Request], AnswerForm | None]:
    """A function that makes the matchers of a folder's model.

    Raises:
        DataError: it has no readable tokenizer.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return make_matchers(Grammars(tokenizer, vocab=vocab, ends=ends_of_text(folder)), vocab)
