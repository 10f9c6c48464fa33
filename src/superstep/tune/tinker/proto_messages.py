"""Tinker's messages that go as protobuf: what is to be learnt from, and what came of it. Numbers of fields are those of
``tinker_public.proto`` in its SDK.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superstep.errors import DataError
from superstep.tune.tinker.protobuf import entry, fields, put_bytes, put_double, put_integer

FLOAT32, INT64, INT32 = 1, 2, 3
"""Of ``DType``."""

DTYPES: Mapping[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}

Numbers = NDArray[Any]
"""Of fp32, int64 or int32."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to learn from.

    Attributes:
        tokens: of the input.
        inputs: what the loss reads, by name.
    """

    tokens: tuple[int, ...]
    inputs: Mapping[str, Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Sequences and a loss.

    Attributes:
        model_id: of the model.
        seq_id: the number of the request among those of its model.
        data: the sequences.
        loss_fn: the loss by name.
        config: its settings.
        forward_only: no gradient is wanted.
    """

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def read_forward_backward(body: bytes) -> ForwardBackward:
    """The request in a body.

    Raises:
        DataError: it cannot be read, or holds what is not here; names the sequence.
    """
    model_id, loss_fn, seq_id, forward_only = "", "", 0, False
    data: list[Datum] = []
    older: dict[str, float | str] = {}
    newer: dict[str, float | str] = {}
    for part in fields(body):
        match part.number:
            case 1:
                model_id = part.text
            case 2:
                seq_id = part.integer
            case 3:
                data.append(_datum(part.data, len(data)))
            case 4:
                loss_fn = part.text
            case 5:
                older |= _older(part.data)
            case 6:
                forward_only = bool(part.integer)
            case 7:
                name, value = entry(part.data)
                newer[name] = _setting(value)
            case _:
                pass
    return ForwardBackward(
        model_id=model_id,
        seq_id=seq_id,
        data=tuple(data),
        loss_fn=loss_fn,
        config=newer or older,
        forward_only=forward_only,
    )


def _older(body: bytes) -> dict[str, float | str]:
    name, value = "", 0.0
    for part in fields(body):
        if part.number == 1:
            name = part.text
        elif part.number == 2:
            value = part.double
    return {name: value}


def _setting(body: bytes) -> float | str:
    value: float | str = 0.0
    for part in fields(body):
        value = part.double if part.number == 1 else part.text
    return value


def _datum(body: bytes, at: int) -> Datum:
    tokens: list[int] = []
    inputs: dict[str, Numbers] = {}
    for part in fields(body):
        if part.number == 1:
            tokens += _chunk(part.data, at)
        elif part.number == 2:
            name, value = entry(part.data)
            inputs[name] = _tensor(value, f"data[{at}].loss_fn_inputs['{name}']")
    return Datum(tuple(tokens), inputs)


def _chunk(body: bytes, at: int) -> list[int]:
    tokens: list[int] = []
    for part in fields(body):
        if part.number != 1:
            kind = {2: "an image", 3: "audio"}.get(part.number, "of an unknown kind")
            raise DataError(f"data[{at}].model_input has a chunk that is {kind}; this model reads tokens alone.")
        for inner in fields(part.data):
            if inner.number == 1:
                tokens += _numbers(inner.data, INT32, f"data[{at}].model_input").tolist()
    return tokens


def _tensor(body: bytes, name: str) -> Numbers:
    dense, dtype, shape = b"", 0, []
    for part in fields(body):
        match part.number:
            case 1:
                dense = part.data
            case 2:
                raise DataError(f"{name} is sparse; give a dense tensor.")
            case 3:
                dtype = part.integer
            case 4:
                shape += part.integers
            case _:
                pass
    numbers = _numbers(dense, dtype, name)
    if shape and (min(shape) < 0 or math.prod(shape) != len(numbers)):
        raise DataError(f"{name} has {len(numbers)} numbers, and its shape is {shape}.")
    return numbers.reshape(shape) if shape else numbers


def _numbers(data: bytes, dtype: int, name: str) -> Numbers:
    kind = DTYPES.get(dtype)
    if kind is None:
        raise DataError(f"{name} is of dtype {dtype}, which is none of float32, int64 and int32.")
    if len(data) % kind.itemsize:
        raise DataError(f"{name} has {len(data)} bytes, which are no row of {kind.name}.")
    return np.frombuffer(data, dtype=kind)


def write_output(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """What came of sequences.

    Args:
        logprobs: of the targets of each.
        metrics: named as Tinker's client combines them: ``loss:sum``.
    """
    ends = np.cumsum([0, *(4 * len(row) for row in logprobs)], dtype="<i8")
    rows = b"".join(np.ascontiguousarray(row, dtype="<f4").tobytes() for row in logprobs)
    batched = put_bytes(1, rows) + put_bytes(2, ends.tobytes()) + put_integer(3, FLOAT32)
    named = put_bytes(1, "logprobs") + put_bytes(2, batched)
    record = put_bytes(1, "TorchLossReturn") + put_bytes(2, named) + put_integer(3, len(logprobs))
    numbers = b"".join(put_bytes(3, put_bytes(1, name) + put_double(2, value)) for name, value in metrics.items())
    return put_bytes(1, "TorchLossReturn") + put_bytes(2, record) + numbers


Top = Sequence[Sequence[tuple[int, float]]]
"""For each token the likeliest ones at its place, with their log-probabilities."""

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""In a cell without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """An answer.

    Attributes:
        tokens: drawn.
        logprobs: of them, by the distribution that they were drawn from: after temperature and what was cut off. Only
            then is exp(trainer's - these) an importance weight.
        is_cut: whether its room ended it.
        top: the likeliest tokens at each place; None where they were not asked for.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool
    top: Top | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The answers to a prompt.

    Attributes:
        sequences: as many as were asked for.
        prompt: the log-probability of each of its tokens, NaN where there is none; None where nobody asked.
        prompt_top: the likeliest tokens at each place of the prompt; None where nobody asked.
        cached_tokens: of the prompt, those whose keys were there already.
    """

    sequences: Sequence[SampledSequence]
    prompt: Sequence[float] | None = None
    prompt_top: Top | None = None
    cached_tokens: int = 0


def write_sampled(result: Sampled) -> bytes:
    """A ``SampleResponse``."""
    out = b"".join(put_bytes(1, _sequence(one)) for one in result.sequences)
    if result.prompt is not None:
        out += put_bytes(2, np.asarray(result.prompt, dtype="<f4").tobytes())
    if result.prompt_top is not None:
        out += put_bytes(3, _top(result.prompt_top))
    return out + put_integer(4, result.cached_tokens)


def _sequence(one: SampledSequence) -> bytes:
    out = put_integer(1, int(one.is_cut)) + put_bytes(2, np.asarray(one.tokens, dtype="<i4").tobytes())
    out += put_bytes(3, np.asarray(one.logprobs, dtype="<f4").tobytes())
    return out if one.top is None else out + put_bytes(4, _top(one.top))


def _top(rows: Top) -> bytes:
    width = max((len(row) for row in rows), default=0)
    ids = np.full((len(rows), width), NO_TOKEN, dtype="<i4")
    logprobs = np.full((len(rows), width), NO_LOGPROB, dtype="<f4")
    for place, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row):
            ids[place, rank], logprobs[place, rank] = token, logprob
    sizes = put_integer(3, width) + put_integer(4, len(rows))
    return put_bytes(1, ids.tobytes()) + put_bytes(2, logprobs.tobytes()) + sizes
