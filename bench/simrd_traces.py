"""Traces of operations that the authors of dynamic tensor rematerialization recorded of eight models (simrd,
github.com/uwsampl/dtr-prototype, ``simrd/logs.zip``): a line of JSON for each instruction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.dtr_trace import Event, Hold, OperationCall, Pin, Release


def read_trace(lines: Iterable[str]) -> tuple[Event, ...]:
    """The events after the annotation START. What the trace still refers to at its end has to be there then."""
    read = (json.loads(line) for line in lines)
    for line in read:
        if line["INSTRUCTION"] == "ANNOTATE" and line["ANNOTATION"] == "START":
            break
    names = _Names()
    events = [event for line in read for event in _read(line, read, names)]
    return (*events, *(Pin(value) for value, count in names.references.items() if count > 0))


@dataclass(slots=True)
class _Names:
    """The values of a trace by their names now. A storage has the bytes of its first value."""

    values: dict[str, int] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    storage_bytes: dict[int, int] = field(default_factory=dict)

    def make(self, name: str, storage_bytes: int) -> int:
        value = len(self.references)
        self.values[name] = value
        self.references[value] = 1
        self.storage_bytes[value] = storage_bytes
        return value

    def release(self, value: int) -> Release:
        self.references[value] -= 1
        return Release(value)

    def hold(self, name: str, value: int) -> Hold:
        self.values[name] = value
        self.references[value] += 1
        return Hold(value)


def _read(line: dict[str, Any], rest: Iterator[dict[str, Any]], names: _Names) -> Iterator[Event]:
    match line["INSTRUCTION"]:
        case "CONSTANT":
            size = int(next(rest)["MEMORY"])
            value = names.make(line["NAME"], size)
            yield OperationCall(0.0, (), (value,), (size,), (None,))
            yield Pin(value)
        case "COPY":
            yield names.hold(line["DST"], names.values[line["SRC"]])
        case "COPY_FROM":
            yield names.release(names.values[line["DST"]])
            yield names.hold(line["DST"], names.values[line["SRC"]])
        case "RELEASE":
            if line["NAME"] in names.values:
                yield names.release(names.values[line["NAME"]])
        case "CALL":
            yield _call(line, rest, names)
        case "MUTATE":
            yield from _mutate(line, names)
        case "ANNOTATE":
            pass
        case other:
            raise ValueError(f"{other} is no instruction of a simrd trace")


def _call(line: dict[str, Any], rest: Iterator[dict[str, Any]], names: _Names) -> OperationCall:
    inputs = tuple(names.values[name] for name in line["ARGS"])
    outputs, sizes, shares = [], [], []
    for name in line["RESULT"]:
        size, alias = int(next(rest)["MEMORY"]), int(next(rest)["ALIAS"])
        shared = None if alias < 0 else inputs[alias]
        outputs.append(names.make(name, size if shared is None else names.storage_bytes[shared]))
        sizes.append(size if shared is None else 0)
        shares.append(shared)
    return OperationCall(float(line["TIME"]), inputs, tuple(outputs), tuple(sizes), tuple(shares))


def _mutate(line: dict[str, Any], names: _Names) -> Iterator[Event]:
    """A mutated argument is a new value."""
    inputs = tuple(names.values[name] for name in line["ARGS"])
    changed = [inputs[number] for number in line["MUTATE"]]
    sizes = tuple(names.storage_bytes[value] for value in changed)
    outputs = tuple(names.make(line["ARGS"][number], size) for number, size in zip(line["MUTATE"], sizes, strict=True))
    yield OperationCall(float(line["TIME"]), inputs, outputs, sizes, (None,) * len(outputs))
    yield from (names.release(value) for value in changed)
