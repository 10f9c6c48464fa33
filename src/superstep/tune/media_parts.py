"""Pictures and sounds in the messages of a conversation, as OpenAI's and Hugging Face's processors write them.

    {"type": "image", "image": "cat.png"}                              also with path or url in the place of image
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    {"type": "audio", "audio": "hello.wav"}                            also audio_url, path or url
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}

A path is relative to the file of the record. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from superstep.data.sources.media_input import MediaInput, Medium
from superstep.errors import DataError
from superstep.tune.conversation_records import Conversation, Message, record_error

KINDS = {"image": "image", "image_url": "image", "audio": "audio", "audio_url": "audio", "input_audio": "audio"}
"""What the types of parts hold."""
WORDS = {"image": "picture", "audio": "sound"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a message that is no text, and its place."""

    where: str
    kind: str
    fields: Mapping[str, Any]


class ConversationMedia:
    """Reads the pictures and sounds of conversations.

    Args:
        reads: what the model reads beside text; None for text alone.
        folder: for what records hold themselves, as data: URLs.
    """

    def __init__(self, reads: MediaInput | None, folder: Path) -> None:
        self.reads = reads
        self._folder = folder

    @property
    def kinds(self) -> tuple[str, ...]:
        """The sorts of parts beside text that the model reads."""
        return () if self.reads is None else (self.reads.kind,)

    def show(self, record: Conversation) -> tuple[Message, ...]:
        """The messages for a template, their parts without what they hold.

        Raises:
            DataError: a part is of a sort that the model does not read, or in an answer that is learnt.
        """
        return tuple(self._show(record, number, message) for number, message in enumerate(record.messages))

    def measure(self, record: Conversation, messages: int) -> list[Medium]:
        """The pictures or sounds of the first messages, in their order.

        Raises:
            DataError: a file cannot be read, or a part names none.
        """
        every = (part for number in range(messages) for part in _parts(record, number))
        return [self._measure(record, part) for part in every]

    def _show(self, record: Conversation, number: int, message: Message) -> Message:
        parts = list(_parts(record, number))
        for part in parts:
            if part.kind not in self.kinds:
                reads = " and ".join(["text", *(f"{WORDS[kind]}s" for kind in self.kinds)])
                kind = part.fields.get("type")
                raise record_error(
                    record.where,
                    f"has a part of type {kind!r}, {part.where}, and the model reads {reads}",
                    "leave it out",
                )
            if record.learnt[number]:
                raise record_error(
                    record.where, f"has a {WORDS[part.kind]} in an answer, {part.where}", "the model writes text alone"
                )
        if not parts:
            return message
        shown = [
            part if _is_text(part) else {"type": KINDS[part["type"]], KINDS[part["type"]]: ""}
            for part in message["content"]
        ]
        return {**message, "content": shown}

    def _measure(self, record: Conversation, part: _Part) -> Medium:
        assert self.reads is not None
        path = self._find(record, part)
        try:
            medium = self.reads.measure(path)
        except DataError as error:
            raise record_error(record.where, f"{part.where}: {str(error).rstrip('.')}", "mend the record") from None
        inside = path.is_relative_to(self._folder)
        return replace(medium, path=str(path.relative_to(self._folder) if inside else path.absolute()))

    def _find(self, record: Conversation, part: _Part) -> Path:
        """The file of a part."""
        source, suffix = _source_of(part)
        if source is None:
            mend = f'{{"type": "{part.kind}", "{part.kind}": "file"}}'
            raise record_error(record.where, f"has {part.where} without a file or a data: URL", f"give {mend}")
        if suffix is not None:
            return self._store(record, part, source, suffix)
        if source.startswith("data:"):
            about, _, data = source.partition(",")
            return self._store(record, part, data, about.removeprefix("data:").partition(";")[0].partition("/")[2])
        if "://" in source.removeprefix("file://"):
            raise record_error(
                record.where,
                f"has a remote URL, {part.where} = '{source[:80]}', and nothing is downloaded in a run",
                "save the file, and give its path",
            )
        return record.folder / source.removeprefix("file://")

    def _store(self, record: Conversation, part: _Part, data: str, suffix: str) -> Path:
        """A file of what a record holds itself."""
        try:
            held = base64.b64decode(data, validate=True)
        except (ValueError, binascii.Error) as error:
            raise record_error(record.where, f"has {part.where} that is no base64 ({error})", "mend it") from None
        suffix = suffix.removeprefix("x-") if suffix.removeprefix("x-").isalnum() else "bin"
        path = self._folder / "media" / f"{hashlib.sha256(held).hexdigest()[:32]}.{suffix}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(held)
        return path


def _parts(record: Conversation, number: int) -> Iterator[_Part]:
    """The parts of a message that are no text."""
    content = record.messages[number].get("content")
    for k, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping) and not _is_text(part):
            yield _Part(f"messages[{number}].content[{k}]", KINDS.get(str(part.get("type")), ""), part)


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _source_of(part: _Part) -> tuple[str | None, str | None]:
    """What a part names, or the base64 text that it holds and the suffix of its file."""
    for name in (part.kind, f"{part.kind}_url", "input_audio", "path", "url"):
        value = part.fields.get(name)
        if isinstance(value, Mapping):
            if isinstance(value.get("data"), str):
                return value["data"], str(value.get("format", "wav"))
            value = value.get("url") or value.get("path")
        if isinstance(value, str) and value:
            return value, None
    return None, None
