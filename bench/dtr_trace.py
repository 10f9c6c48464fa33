"""Traces of operations: what a program computes, and how long each value is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class OperationCall:
    """A call of an operation.

    Attributes:
        seconds: of one run.
        inputs: the values that it reads.
        outputs: the values that it makes, numbered from 0 on over the whole trace.
        sizes: bytes of each output; 0 for one that shares its storage.
        shares: for each output the input that has its storage; None for a storage of its own.
    """

    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    shares: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """One more reference to a value, which has one from the operation that makes it."""

    value: int


@dataclass(frozen=True, slots=True)
class Pin:
    """The value is there from here on, and stays."""

    value: int


@dataclass(frozen=True, slots=True)
class Release:
    """One reference less. Without any, the trace does not read the value again."""

    value: int


Event: TypeAlias = OperationCall | Hold | Pin | Release


def make_value(seconds: float, inputs: tuple[int, ...], value: int, size: int) -> OperationCall:
    """An operation with one output."""
    return OperationCall(seconds, inputs, (value,), (size,), (None,))


def make_chain(units: int) -> tuple[Event, ...]:
    """Forward and backward passes of a chain of units of one second and one byte each: the trace of the proof of
    Kirisame 2021 (appendix A). The forward pass of unit i makes value i, its backward pass value 2 · units - 1 - i from
    the input of the unit and the gradient behind it.
    """
    events: list[Event] = [make_value(1.0, (i - 1,) if i else (), i, 1) for i in range(units)]
    for i in reversed(range(units)):
        gradient = 2 * units - 1 - i
        events.append(Release(i))
        events.append(
            make_value(1.0, (*((i - 1,) if i else ()), *((gradient - 1,) if i < units - 1 else ())), gradient, 1)
        )
        if i < units - 1:
            events.append(Release(gradient - 1))
    return tuple(events)
