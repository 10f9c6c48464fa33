"""TextProtocol: what the HTTP handlers need of the text part: tokens from text, text from tokens, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from superstep.serve.scheduling.request import Constraint

Json = dict[str, Any]
"""A JSON object of the client, such as a message or a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        tools: in OpenAI's form, ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
        is_required: whether at least one must be called.
        only: the one tool that must be called; empty for any.
        is_parallel: whether several may be called.
    """

    tools: tuple[Json, ...] = ()
    is_required: bool = False
    only: str = ""
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """A piece of an answer: text for the reader, or part of a call.

    Attributes:
        call: the number of the call, from 0; None for text.
        name: of the tool, whole, in the first piece of a call.
        arguments: a piece of the JSON of its arguments.
    """

    content: str = ""
    call: int | None = None
    name: str = ""
    arguments: str = ""


class AnswerTextReader(Protocol):
    """Reads one answer: tokens in, text out, whole characters only, up to the first stop text."""

    @property
    def stop(self) -> str | None:
        """The stop text that was found; no text comes after it."""
        ...

    def push(self, token: int) -> str:
        """The text that is certain now. Held back: an incomplete character, and a possible begin of a stop text."""
        ...

    def end(self) -> str:
        """The text that was held back, at the end."""
        ...


class ToolCallReader(Protocol):
    """Finds the calls in one answer's text. The joined pieces do not depend on how the text was cut."""

    def push(self, text: str) -> Sequence[AnswerPiece]: ...

    def end(self) -> Sequence[AnswerPiece]:
        """What was held back, at the end."""
        ...


class TextProtocol(Protocol):
    """The text of one model: its tokenizer, its chat template, the form of its tool calls."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text. No text becomes a special token."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; a special token's spelling."""
        ...

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text of more than ``n`` times as many has more than ``n`` tokens."""
        ...

    def chat(self, messages: Sequence[Json], tools: Sequence[Json], most_bytes: int | None = None) -> Sequence[int]:
        """The prompt of a conversation, by the model's chat template, up to where the assistant speaks.

        Args:
            most_bytes: of the template's text; a longer one is refused before tokenization. None for any.

        Raises:
            ConfigError: a message is malformed, the template refuses it, or its text is too long; names the field.
        """
        ...

    @property
    def chat_stops(self) -> Sequence[str]:
        """Texts that end an answer in a chat, where the template has no token for it."""
        ...

    def reader(self, stop: Sequence[str], *, shows_special: bool = False) -> AnswerTextReader:
        """A reader of one answer. ``shows_special``: whether special tokens appear in the text; they may mark calls."""
        ...

    def tool_reader(self, use: ToolUse) -> ToolCallReader: ...

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """The form of an answer that must call a tool, or None; raises ConfigError for an impossible schema."""
        ...

    def check_constraint(self, constraint: Constraint) -> None:
        """Compile a constraint; raises ConfigError where it is malformed, too large, or matches nothing."""
        ...
