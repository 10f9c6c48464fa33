"""The words of one model, put together: what the HTTP interface asks of the text part, and the engine of forms.

``TextBackend`` is the ``TokenTexts`` of ``api/words.py``; ``make_matchers`` gives the ``Matchers`` of ``engine.py``.
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
        """Texts that end an answer in a chat, where the template has no token for it."""
        return self._encoder.template.stops

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text. No spelling in it becomes a special token."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's spelling."""
        return self._words.bytes_of(token)

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text of more than ``n`` times as many has more than ``n`` tokens."""
        return self._words.longest_bytes

    def chat(self, messages: Sequence[Json], tools: Sequence[Json], most_bytes: int | None = None) -> Sequence[int]:
        """The prompt of a conversation, up to where the assistant speaks.

        Raises:
            ConfigError: a message is malformed, the template refuses it, or its text has more bytes than
                ``most_bytes``; names the field.
        """
        return self._encoder.tokens(Chat(messages=messages, tools=tools), most_bytes)

    def reader(self, stop: Sequence[str], *, shows_special: bool = False) -> TextReader:
        """A reader of one answer that ends at the first of some texts; special tokens are spelled out, or left out.

        Raises:
            ConfigError: for texts that cannot be looked for.
        """
        check_stops(stop)
        return TextReader(reader.AnswerReader(self._words, stop, skip_special=not shows_special))

    def tool_reader(self, use: ToolUse) -> ToolReader:
        """A reader of the calls in one answer; of none, where the model's template shows no form of calls."""
        names = [tool["function"]["name"] for tool in use.tools]
        return ToolReader(CallParser(self._form, names) if self._form else None)

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """The form of an answer that must call, or None where it is free.

        Raises:
            ConfigError: for tools that cannot be, or a model that shows no form of calls.
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
        """The stop text that was met; no text comes after it."""
        return self._core.stop

    def push(self, token: int) -> str:
        """The text that is certain now."""
        return self._core.push(token).text

    def end(self) -> str:
        """What was held back, when no token follows."""
        return self._core.end().text


class ToolReader:
    """Finds the calls in the text of one answer."""

    def __init__(self, parser: CallParser | None) -> None:
        self._parser = parser
        self._calls = 0

    def push(self, text: str) -> Sequence[AnswerPiece]:
        """What is certain now."""
        return self._read(self._parser.push(text) if self._parser else Delta(text))

    def end(self) -> Sequence[AnswerPiece]:
        """What was held back, when no text follows."""
        return self._read(self._parser.end() if self._parser else Delta())

    def _read(self, delta: Delta) -> Sequence[AnswerPiece]:
        pieces = [AnswerPiece(content=delta.text)] if delta.text else []
        for call in delta.calls:
            pieces.append(AnswerPiece(call=self._calls, name=call.name, arguments=call.arguments))
            self._calls += 1
        return pieces


class AnswerForm:
    """The form of one answer, as the engine keeps to it.

    Args:
        core: at the start of an answer.
        vocab: of the model.
    """

    def __init__(self, core: GrammarMatcher, vocab: int) -> None:
        self._core = core
        self._vocab = vocab

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow."""
        return self._core.is_done

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next: bool [V]."""
        bits = np.unpackbits(self._core.mask().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocab].astype(np.bool_))

    def advance(self, token: int) -> None:
        """Goes on with a token that was allowed."""
        is_legal = self._core.advance(token)
        assert is_legal, f"token {token} was drawn and is not allowed"

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of some guessed tokens, from the first on, may follow; nothing changes."""
        # Of a copy: what a guess costs beyond its bounds must not end the answer.
        return self._core.fork().legal(tokens)

    def fork(self) -> AnswerForm:
        """The same place of the form, to go on from independently."""
        return AnswerForm(self._core.fork(), self._vocab)


def make_matchers(grammars: Grammars, vocab: int) -> Callable[[Request], AnswerForm | None]:
    """What makes the form of each request's answer; None for free ones.

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
        DataError: it has no tokenizer that can be read.
        ConfigError: its chat template cannot be used.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    grammars = Grammars(tokenizer, vocab=vocab, ends=ends_of_text(folder))
    return TextBackend(tokenizer, load_chat_template(folder), grammars)


def forms_of(folder: Path, vocab: int) -> Callable[[Request], AnswerForm | None]:
    """What holds answers of a folder's model to their form.

    Raises:
        DataError: it has no tokenizer that can be read.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return make_matchers(Grammars(tokenizer, vocab=vocab, ends=ends_of_text(folder)), vocab)
