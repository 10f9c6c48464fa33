"""A small text part over a tokenizer, for tests of what is above it: one template, one form of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from superstep.data.tokenizer import Tokenizer, train_tokenizer
from superstep.errors import ConfigError
from superstep.serve.api.text_protocol import AnswerPiece, Json, ToolUse
from superstep.serve.scheduling.request import Constraint

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a stop text ends an answer, and naïve café 😀 is cut between tokens",
    'weather tools are called with {"city": "Paris"} and {"a": 1}',
]


def small_tokenizer() -> Tokenizer:
    """Of a few lines: every byte is a token, some pairs are."""
    return train_tokenizer(TEXTS * 4, vocab=300)


@dataclass
class PlainReader:
    """Reads one answer by decoding all of it anew: slow, and plain."""

    tokenizer: Tokenizer
    stops: Sequence[str]
    stop: str | None = None
    tokens: list[int] = field(default_factory=list)
    given: int = 0

    def push(self, token: int) -> str:
        """The text that is certain now."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        while text.endswith("\N{REPLACEMENT CHARACTER}"):
            text = text[:-1]
        found = min(((text.find(stop), stop) for stop in self.stops if stop in text), default=None)
        if found is not None:
            self.stop = found[1]
            return self._give(text, found[0])
        held = max(
            (size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
        return self._give(text, len(text) - held)

    def end(self) -> str:
        """The rest."""
        text = self.tokenizer.decode(self.tokens)
        return self._give(text, len(text))

    def _give(self, text: str, until: int) -> str:
        new = text[self.given : until]
        self.given = max(self.given, until)
        return new


@dataclass
class PlainToolReader:
    """Finds ``<call>name {json}</call>``. Text goes out at once; a call is told in two pieces when it is whole."""

    text: str = ""
    calls: int = 0

    def push(self, text: str) -> list[AnswerPiece]:
        """What is certain now."""
        self.text += text
        said: list[AnswerPiece] = []
        while match := re.match(r"(?s)(.*?)<call>(\w+) (.*?)</call>", self.text):
            said += [AnswerPiece(content=match[1])] if match[1] else []
            half = len(match[3]) // 2
            said.append(AnswerPiece(call=self.calls, name=match[2], arguments=match[3][:half]))
            said.append(AnswerPiece(call=self.calls, arguments=match[3][half:]))
            self.text = self.text[match.end() :]
            self.calls += 1
        if "<" not in self.text and self.text:
            said.append(AnswerPiece(content=self.text))
            self.text = ""
        return said

    def end(self) -> list[AnswerPiece]:
        """The rest, as text."""
        rest, self.text = self.text, ""
        return [AnswerPiece(content=rest)] if rest else []


@dataclass
class PlainWords:
    """The text part of a small tokenizer."""

    tokenizer: Tokenizer
    chat_stops: tuple[str, ...] = ()
    checked: list[Constraint] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        """As the tokenizer does."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """As the tokenizer does."""
        return self.tokenizer.decode(list(tokens))

    def token_bytes(self, token: int) -> bytes:
        """Of the byte-level alphabet, read off the tokenizer."""
        name = self.tokenizer.core.id_to_token(token)
        if token == self.tokenizer.end_of_text:
            return name.encode()
        return bytes(ALPHABET[char] for char in name)

    @property
    def longest_token_bytes(self) -> int:
        """Of all tokens."""
        return max(len(self.token_bytes(token)) for token in range(self.tokenizer.vocab))

    def chat(self, messages: Sequence[Json], tools: Sequence[Json], most_bytes: int | None = None) -> list[int]:
        """``role: content`` in lines; refuses what it does not know."""
        lines = [f"tools: {json.dumps(list(tools))}"] if tools else []
        for place, message in enumerate(messages):
            if message.get("role") not in ("system", "user", "assistant", "tool"):
                raise ConfigError(f"messages[{place}].role = {message.get('role')!r} is no role; choose user.")
            if not isinstance(message.get("content"), str):
                raise ConfigError(f"messages[{place}].content is no text; give text.")
            lines.append(f"{message['role']}: {message['content']}")
        return self.encode("\n".join([*lines, "assistant:"]))

    def reader(self, stop: Sequence[str], *, shows_special: bool = False) -> PlainReader:
        """Of one answer; there is no special token but the end."""
        self.shown.append(shows_special)
        return PlainReader(self.tokenizer, stop)

    def tool_reader(self, use: ToolUse) -> PlainToolReader:
        """Of one answer's calls."""
        return PlainToolReader()

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """A regex, where a call is required."""
        if not use.is_required:
            return None
        names = [use.only] if use.only else [tool["function"]["name"] for tool in use.tools]
        return Constraint(kind="regex", text=f"<call>({'|'.join(names)}) .*</call>")

    def check_constraint(self, constraint: Constraint) -> None:
        """Notes it; refuses what Python's own readers do."""
        self.checked.append(constraint)
        try:
            if constraint.kind == "json_schema" and not isinstance(json.loads(constraint.text), dict):
                raise ConfigError("the schema is no object; give one.")
            if constraint.kind == "regex":
                re.compile(constraint.text)
        except re.error as error:
            raise ConfigError(f"the expression cannot be read ({error}); mend it.") from None


def _alphabet() -> dict[str, int]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


ALPHABET = _alphabet()
"""The characters that byte-level tokenizers spell bytes with."""
