"""The text part of a served model, as the HTTP interface asks for it, and the forms of answers, as the engine does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superstep.data.tokenizer import Tokenizer, load_tokenizer
from superstep.serve.api.words import Json, Said, ToolUse
from superstep.serve.load import ends_of_text
from superstep.serve.request import Constraint, Request
from superstep.serve.text.chat import Chat, ChatTemplate, load_chat_template
from superstep.serve.text.chat_tokens import ChatEncoder
from superstep.serve.text.detokenize import Words
from superstep.serve.text.grammar import Grammars
from superstep.serve.text.grammar import Matcher as PackedMatcher
from superstep.serve.text.reader import Reader
from superstep.serve.text.tool_choice import check_tools, tool_constraint
from superstep.serve.text.tools import CallParser, Delta, form_of


class ModelWords:
    """Text of one model.

    Args:
        tokenizer: of the model.
        template: of its chats.
        vocab: of the model.
        ends: tokens with which it ends an answer.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, vocab: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._encoder = ChatEncoder(template, tokenizer)
        self._words = Words(tokenizer)
        self._grammars = Grammars(tokenizer, vocab=vocab, ends=ends)

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text. No spelling in it becomes a special token."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        return self._words.bytes_of(token)

    def chat(self, messages: Sequence[Json], tools: Sequence[Json]) -> Sequence[int]:
        """The prompt of a conversation, up to where the assistant speaks."""
        check_tools(tools)
        return self._encoder.tokens(Chat(messages=messages, tools=tools))

    @property
    def chat_stops(self) -> Sequence[str]:
        """Texts that end an answer in a chat."""
        return self._template.stops

    def reader(self, stop: Sequence[str]) -> PlainReader:
        """A reader of one answer that ends at the first of some texts."""
        return PlainReader(Reader(self._words, stop, skip_special=True, is_amid=True))

    def tool_reader(self, use: ToolUse) -> Calls:
        """A reader of the calls in one answer."""
        form = form_of(self._template.source(has_tools=True))
        return Calls(None if form is None else CallParser(form, check_tools(use.tools)))

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """The form of an answer that must call."""
        choice: str | Mapping[str, Any] = "required" if use.is_required else "auto"
        if use.only:
            choice = {"type": "function", "function": {"name": use.only}}
        form = form_of(self._template.source(has_tools=True))
        return tool_constraint(use.tools, choice, form, self._tokenizer, is_parallel=use.is_parallel)

    def check_constraint(self, constraint: Constraint) -> None:
        """Compile a constraint, as the engine will."""
        self._grammars.matcher(constraint)


class PlainReader:
    """Tokens in, text out."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def stop(self) -> str | None:
        """The stop text that was met."""
        return self._reader.stop

    def push(self, token: int) -> str:
        """The text that is certain now."""
        return self._reader.push(token).text

    def end(self) -> str:
        """What was held back."""
        return self._reader.end().text


class Calls:
    """Finds calls in text; without a known form of them all is content."""

    def __init__(self, parser: CallParser | None) -> None:
        self._parser = parser
        self._count = 0

    def push(self, text: str) -> Sequence[Said]:
        """What is certain now."""
        return self._said(Delta(text) if self._parser is None else self._parser.push(text))

    def end(self) -> Sequence[Said]:
        """What was held back."""
        return self._said(Delta() if self._parser is None else self._parser.end())

    def _said(self, delta: Delta) -> Sequence[Said]:
        found = [Said(content=delta.text)] if delta.text else []
        for call in delta.calls:
            found.append(Said(call=self._count, name=call.name, arguments=call.arguments))
            self._count += 1
        return found


def load_words(folder: Path, *, vocab: int) -> ModelWords:
    """The text part of a folder's model.

    Raises:
        DataError: it has no tokenizer that can be read.
        ConfigError: its chat template cannot be used.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return ModelWords(tokenizer, load_chat_template(folder), vocab=vocab, ends=ends_of_text(folder))


class Form:
    """The form of one answer, for the engine."""

    def __init__(self, matcher: PackedMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_done

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [V]."""
        words = torch.from_numpy(self._matcher.mask())
        bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[: self._vocab].bool()

    def advance(self, token: int) -> None:
        """Go on with a token that was allowed."""
        is_taken = self._matcher.advance(token)
        assert is_taken, f"token {token} was drawn, and its form does not allow it"


def forms_of(folder: Path, vocab: int) -> Callable[[Request], Form | None]:
    """What holds answers of a folder's model to their form."""
    grammars = Grammars(load_tokenizer(folder / "tokenizer.json"), vocab=vocab, ends=ends_of_text(folder))

    def form(request: Request) -> Form | None:
        constraint = request.sampling.constraint
        return None if constraint is None else Form(grammars.matcher(constraint), vocab)

    return form
