"""What the HTTP handlers ask of the text part: text to tokens, tokens to text as they come, tool calls in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from superstep.serve.scheduling.request import Constraint

Json = dict[str, Any]
"""An object of JSON, such as a message or a schema, in the client's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call, and whether it must.

    Attributes:
        tools: in OpenAI's form, ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
        is_required: whether at least one must be called.
        only: the name of the one tool that must be called; empty for any.
        is_parallel: whether several may be called.
    """

    tools: tuple[Json, ...] = ()
    is_required: bool = False
    only: str = ""
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A piece of an answer: words to the reader, or part of a call.

    Attributes:
        content: words to the reader.
        call: the number of the call that this belongs to, from 0; None for content.
        name: of the tool, whole, with the first piece of a call.
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
        """The stop text that was met; no text comes after it."""
        ...

    def push(self, token: int) -> str:
        """The text that is certain now. Held back: a character that is cut, and what may begin a stop text."""
        ...

    def end(self) -> str:
        """What was held back, when no token follows."""
        ...


class ToolCallReader(Protocol):
    """Finds the calls in the text of one answer. The joined pieces are the same however the text was cut."""

    def push(self, text: str) -> Sequence[Said]:
        """What is certain now."""
        ...

    def end(self) -> Sequence[Said]:
        """What was held back, when no text follows."""
        ...


class TextProtocol(Protocol):
    """Text of one model: its tokenizer, its chat template, the form of its tool calls."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text. No spelling in it becomes a special token."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's spelling."""
        ...

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text of more than ``n`` times as many has more than ``n`` tokens."""
        ...

    def chat(self, messages: Sequence[Json], tools: Sequence[Json], most_bytes: int | None = None) -> Sequence[int]:
        """The prompt of a conversation, by the model's chat template, up to where the assistant speaks.

        Args:
            messages: of the conversation.
            tools: that the model may call.
            most_bytes: of the text that the template makes, which is refused before it is tokenized; None for any.

        Raises:
            ConfigError: a message is malformed, the template refuses it, or its text is too long; names the field.
        """
        ...

    @property
    def chat_stops(self) -> Sequence[str]:
        """Texts that end an answer in a chat, where the template has no token for it."""
        ...

    def reader(self, stop: Sequence[str], *, shows_special: bool = False) -> AnswerTextReader:
        """A reader of one answer that ends at the first of some texts.

        Args:
            stop: those texts.
            shows_special: whether special tokens are spelt out; calls of tools may be marked by them.
        """
        ...

    def tool_reader(self, use: ToolUse) -> ToolCallReader:
        """A reader of the calls in one answer."""
        ...

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """The form of an answer that must call, or None where it is free.

        Raises:
            ConfigError: a tool's parameters are no schema that can be kept.
        """
        ...

    def check_constraint(self, constraint: Constraint) -> None:
        """Compile a constraint, as the engine will.

        Raises:
            ConfigError: it is malformed, too large, or matches nothing.
        """
        ...
