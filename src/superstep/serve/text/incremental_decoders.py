"""How a tokenizer's decoder puts tokens together, as steps that take one token at a time.

Each decoder of the ``tokenizers`` library that a language model's tokenizer has is an ``IncrementalDecoder`` here:
tokens go in one by one, and what is certain comes out. A chain of steps gives the library's own text.

The library's ``DecodeStream`` (0.23) is quicker, 0.6 us a token in the place of 2, but does not serve: on a vocabulary
with byte fallback (Llama, Gemma) 42% of random answers make it raise "Invalid prefix encountered" and 17% get a wrong
text; a run of 4,000 broken bytes takes it 3 s, as it decodes the run again for each token; and what waits at the end of
an answer cannot be had from it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

BYTE = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")
"""How a SentencePiece vocabulary spells a byte."""


class IncrementalDecoder(Protocol):
    """Takes the tokens of one answer in order."""

    def push(self, token: str) -> list[str]:
        """What is certain after one more token."""
        ...

    def end(self) -> list[str]:
        """What is left when no token follows."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The character for each byte in a byte-level vocabulary (Radford 2019): printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + k): byte for k, byte in enumerate(others)}


ALPHABET = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for; its own where it is not in that alphabet."""
    try:
        return bytes([ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


class ByteLevel:
    """Bytes into text, where characters may be cut across tokens."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: str) -> list[str]:
        return [self._decode(byte_level(token))]

    def end(self) -> list[str]:
        return [self._decode(b"", True)]  # noqa: FBT003 - its only name is `final`, by position


class ByteFallback:
    """Tokens such as ``<0xE4>`` into text.

    A run of them that is no UTF-8 becomes as many U+FFFD, so each run waits for its end.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        byte = BYTE.fullmatch(token)
        if byte:
            self._run.append(int(byte[1], 16))
            return []
        return [*self.end(), token]

    def end(self) -> list[str]:
        run, self._run = self._run, bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class Each:
    """The same change to every token."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def push(self, token: str) -> list[str]:
        return [self._change(token)]

    def end(self) -> list[str]:
        return []


class Metaspace:
    """A sign for the space; the first token of a text loses it where one was put before the text."""

    def __init__(self, sign: str, *, is_prepended: bool) -> None:
        self._sign = sign
        self._space = "" if is_prepended else " "

    def push(self, token: str) -> list[str]:
        space, self._space = self._space, " "
        return [token.replace(self._sign, space)]

    def end(self) -> list[str]:
        return []


class StripStart:
    """At most ``most`` of a character less at the start of the whole text."""

    def __init__(self, char: str, most: int) -> None:
        self._char = char
        self._most = most

    def push(self, token: str) -> list[str]:
        if not self._most or not token:
            return [token]
        rest = strip_start(token, self._char, self._most)
        self._most = 0 if rest else self._most - len(token)
        return [rest]

    def end(self) -> list[str]:
        return []


class Joined:
    """Spaces between tokens: what the library does for a tokenizer without a decoder."""

    def __init__(self) -> None:
        self._between = ""

    def push(self, token: str) -> list[str]:
        between, self._between = self._between, " "
        return [between + token]

    def end(self) -> list[str]:
        return []


class DecodeAtEnd:
    """Tokens that are decoded all at once at the end: the last resort, for decoders that need what follows."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._tokens: list[str] = []

    def push(self, token: str) -> list[str]:
        self._tokens.append(token)
        return []

    def end(self) -> list[str]:
        tokens, self._tokens = self._tokens, []
        return [self._decode(tokens)]


def strip_start(text: str, char: str, most: int) -> str:
    """Without the first ``most`` characters that are ``char``."""
    cut = 0
    while cut < min(most, len(text)) and text[cut] == char:
        cut += 1
    return text[cut:]


def steps(
    decoder: Mapping[str, Any] | None, decode_all: Callable[[list[str]], str]
) -> Callable[[], list[IncrementalDecoder]]:
    """A maker of fresh steps for a decoder as it stands in ``tokenizer.json``.

    Args:
        decoder: the table under ``decoder``; None joins tokens by spaces.
        decode_all: the library's own decoding of all tokens at once, for decoders that have no steps here.
    """
    if decoder is None:
        return lambda: [Joined()]
    makers: list[Callable[[], IncrementalDecoder]] = []
    is_fused = False
    for part in _parts(decoder):
        maker = _fuse(part) if is_fused else _single(part)
        if maker is None:
            return lambda: [DecodeAtEnd(decode_all)]
        if part["type"] in ("Fuse", "ByteLevel"):
            is_fused = True
        makers.append(maker)
    return lambda: [make() for make in makers]


def _parts(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _parts(inner)]


def _single(part: Mapping[str, Any]) -> Callable[[], IncrementalDecoder] | None:
    """A step that sees tokens; None for a decoder that is not known."""
    match part:
        case {"type": "ByteLevel"}:
            return ByteLevel
        case {"type": "ByteFallback"}:
            return ByteFallback
        case {"type": "Fuse"}:
            return lambda: Each(str)
        case {"type": "Metaspace", "replacement": str(sign)}:
            prepended = part.get("prepend_scheme", "always") != "never"
            return lambda: Metaspace(sign, is_prepended=prepended)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return lambda: Each(lambda token: token.replace(old, new))
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return lambda: Each(lambda token: strip_start(token, char, start))
    return None


def _fuse(part: Mapping[str, Any]) -> Callable[[], IncrementalDecoder] | None:
    """A step that sees pieces of one text, wherever they are cut."""
    match part:
        case {"type": "Fuse"}:
            return lambda: Each(str)
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return lambda: StripStart(char, start)
    return None


def push_through(chain: Sequence[IncrementalDecoder], tokens: Iterable[str]) -> str:
    """What comes out of a chain of steps for some tokens."""
    pieces = list(tokens)
    for step in chain:
        pieces = [piece for token in pieces for piece in step.push(token)]
    return "".join(pieces)


def end_of(chain: Sequence[IncrementalDecoder]) -> str:
    """What a chain of steps still held."""
    pieces: list[str] = []
    for step in chain:
        pieces = [piece for token in pieces for piece in step.push(token)] + step.end()
    return "".join(pieces)
