"""Training records: a conversation, or a prompt and its completion, from a line of JSON or a row of parquet.

    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "tools": [...]}
    {"prompt": "2 + 2 =", "completion": " 4"}                                     as they are, no template
    {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}
    {"prompt": ..., "chosen": ..., "rejected": ...}                               two answers, for preferences

Content in parts may have pictures or sounds (``media_parts``). An assistant's message may have ``"weight": 0``, as in
OpenAI's fine-tuning files: it is context and not learnt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from superstep.data.preparation.corpus import objects
from superstep.data.preparation.read_errors import kind, refusal
from superstep.data.preparation.records import RecordFields
from superstep.errors import DataError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, and which of them are learnt.

    Attributes:
        where: the place of the record.
        messages: as in OpenAI's chat completions.
        tools: that the model may call.
        learnt: for each message, whether it is an answer to learn.
        folder: of the record's file.
    """

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    learnt: tuple[bool, ...]
    folder: Path = Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A text and its completion, without a template."""

    where: str
    prompt: str
    completion: str


Record = Conversation | Completion


def records(paths: tuple[str, ...]) -> Iterator[tuple[Record, int]]:
    """Each record of some files, and its bytes.

    Raises:
        DataError: a file cannot be read, or a record has none of the forms; names the line.
    """
    for fields in objects(paths):
        yield record_of(fields), fields.read_bytes


def preferences(paths: tuple[str, ...]) -> Iterator[tuple[Record, Record, int]]:
    """Each record's preferred answer, the other one, and its bytes.

    Raises:
        DataError: a file cannot be read, or a record is no preference; names the line.
    """
    for fields in objects(paths):
        for name in ("chosen", "rejected"):
            if fields.values.get(name) is None:
                raise record_error(fields.where, f"has no {name}", "give it as text or as messages, beside its prompt")
        chosen, rejected = (_read_preferred(fields, name) for name in ("chosen", "rejected"))
        yield chosen, rejected, fields.read_bytes


def record_error(where: str, rule: str, mend: str) -> DataError:
    """An error about a record, in one line."""
    return refusal(f"'{where}'", rule, mend)


def record_of(fields: RecordFields) -> Record:
    """Parse a record.

    Raises:
        DataError: it has none of the forms.
    """
    record = _parse(fields)
    return replace(record, folder=fields.folder) if isinstance(record, Conversation) else record


def _parse(fields: RecordFields) -> Record:
    where, values = fields.where, {name: value for name, value in fields.values.items() if value is not None}
    if "messages" in values:
        messages = _messages(values["messages"], "messages", where)
        return _conversation(where, messages, _are_answers(messages), values)
    if "prompt" not in values or "completion" not in values:
        has = ", ".join(values) or "none"
        raise record_error(
            where, f"has no messages, and no prompt with a completion (its fields: {has})", "give one of them"
        )
    return _read_completed(where, values["prompt"], "completion", values)


def _read_preferred(fields: RecordFields, name: str) -> Record:
    """One answer of a preference. Without a separate prompt, it is the last message."""
    values = {key: value for key, value in fields.values.items() if value is not None}
    is_whole = isinstance(values[name], list) and isinstance(values.get("prompt", ""), str)
    if not is_whole:
        if "prompt" not in values:
            raise record_error(fields.where, f"has a {name} answer and no prompt", "give the prompt, or whole messages")
        return _read_completed(fields.where, values["prompt"], name, values)
    # Whole conversations, with the answer as the last message; a text prompt repeats the first message.
    messages = _messages(values[name], name, fields.where)
    if not messages or messages[-1].get("role") != "assistant":
        raise record_error(fields.where, f"has {name} messages that do not end with an answer", "end them with one")
    learnt = (*(False,) * (len(messages) - 1), True)
    return _conversation(fields.where, messages, learnt, values)


def _read_completed(where: str, prompt: object, name: str, values: Mapping[str, Any]) -> Record:
    completion = values[name]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise record_error(where, f"has an empty {name}", "leave the record out")
        for key, text in (("prompt", prompt), (name, completion)):
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise record_error(where, f"holds half of a surrogate pair in its {key}", "mend it")
        return Completion(where=where, prompt=prompt, completion=completion)
    if isinstance(prompt, str) != isinstance(completion, str):
        raise record_error(
            where, f"has text and messages in prompt and {name}", "give both as text, or both as messages"
        )
    before, after = _messages(prompt, "prompt", where), _messages(completion, name, where)
    return _conversation(where, before + after, (False,) * len(before) + _are_answers(after), values)


def _conversation(
    where: str, messages: tuple[Message, ...], learnt: tuple[bool, ...], values: Mapping[str, Any]
) -> Conversation:
    if not any(learnt):
        raise record_error(where, "has no assistant turn to learn", "give one, or leave the record out")
    plain = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    tools = _parse_value(values.get("tools", ()), "tools", where)
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise record_error(where, f"has tools that are {kind(tools)}", "give a list of objects")
    return Conversation(where=where, messages=plain, tools=tuple(tools), learnt=learnt)


def _messages(value: object, name: str, where: str) -> tuple[Message, ...]:
    value = _parse_value(value, name, where)
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise record_error(where, f"has {name} that are {kind(value)}", "give a list of objects with role and content")
    for message in value:
        if message.get("weight", 0) not in (0, 1):
            raise record_error(where, f"has a message of weight {message['weight']}", "a weight is 0 or 1")
    # Columns of parquet have every key of every message, null where it is absent.
    return tuple({key: inner for key, inner in message.items() if inner is not None} for message in value)


def _are_answers(messages: Sequence[Message]) -> tuple[bool, ...]:
    return tuple(message.get("role") == "assistant" and message.get("weight", 1) == 1 for message in messages)


def _parse_value(value: object, name: str, where: str) -> Any:  # noqa: ANN401 - any JSON
    """A list, which a column of parquet may hold as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise record_error(where, f"has {name} that are no JSON ({error})", "give a list of objects") from None
