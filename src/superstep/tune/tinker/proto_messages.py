"""Tinker's protobuf messages, as in ``tinker.proto``: training sequences and results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from superstep.errors import DataError
from superstep.tune.tinker import tinker_pb2 as pb

DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}

LOSS_RETURN = "TorchLossReturn"
"""The type of a loss's outputs, by which the client reads them."""

Numbers = NDArray[Any]
"""Arrays of fp32, int64 or int32."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence.

    Attributes:
        tokens: of the input.
        inputs: of the loss, by name.
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
        forward_only: without a gradient.
    """

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Parse the request in a body.

    Raises:
        DataError: it cannot be read, or has unsupported fields; names the sequence.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"the protobuf body is no ForwardBackwardRequest: {reason}.") from None
    newer = message.loss_fn_config_v2.items()
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(_datum(datum, f"data[{at}]") for at, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        config={key: value.text if value.HasField("text") else value.number for key, value in newer}
        or dict(message.loss_fn_config),
        forward_only=message.forward_only,
    )


def _datum(datum: pb.Datum, name: str) -> Datum:
    tokens = [token for chunk in datum.model_input for token in _tokens(chunk, f"{name}.model_input")]
    inputs = datum.loss_fn_inputs.items()
    return Datum(
        tuple(tokens), {key: _tensor(value, f"{name}.loss_fn_inputs['{key}']") for key, value in sorted(inputs)}
    )


def _tokens(chunk: pb.Chunk, name: str) -> list[int]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        article = {"image": "an image", "audio": "audio"}.get(kind, "of an unknown kind")
        raise DataError(f"{name} has a chunk that is {article}; this model reads tokens alone.")
    return list(_numbers(chunk.encoded_text.tokens, pb.DTYPE_INT32, name).tolist())


def _tensor(tensor: pb.Tensor, name: str) -> Numbers:
    if tensor.HasField("sparse"):
        raise DataError(f"{name} is sparse; give a dense tensor.")
    numbers, shape = _numbers(tensor.dense, tensor.dtype, name), list(tensor.shape)
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
    """Encode results of sequences.

    Args:
        logprobs: of the targets of each.
        metrics: named as Tinker's client combines them: ``loss:sum``.
    """
    ends = np.cumsum([0, *(4 * len(row) for row in logprobs)])
    rows = b"".join(_floats(row) for row in logprobs)
    batched = pb.BatchedTensor(data=rows, offsets=ends.astype("<i8").tobytes(), dtype=pb.DTYPE_FLOAT32)
    record = pb.ArrayRecord(type_tag=LOSS_RETURN, fields={"logprobs": batched}, num_datums=len(logprobs))
    output = pb.ForwardBackwardOutput(loss_fn_output_type=LOSS_RETURN, loss_fn_outputs=[record], metrics=dict(metrics))
    return bytes(output.SerializeToString())


Top = Sequence[Sequence[tuple[int, float]]]
"""For each token, the likeliest ones at its place with their log-probabilities."""

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""Empty cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """An answer.

    Attributes:
        tokens: drawn.
        logprobs: of the distribution that they were drawn from: after temperature and truncation. Only then is
            exp(trainer's - these) an importance weight.
        is_cut: whether the length limit ended it.
        top: the likeliest tokens at each place; None if not requested.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool
    top: Top | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The answers to a prompt.

    Attributes:
        sequences: as many as requested.
        prompt: the log-probability of each of its tokens, NaN for the first; None if not requested.
        prompt_top: the likeliest tokens at each place of the prompt; None if not requested.
        cached_tokens: of the prompt, from the prefix cache.
    """

    sequences: Sequence[SampledSequence]
    prompt: Sequence[float] | None = None
    prompt_top: Top | None = None
    cached_tokens: int = 0


def write_sampled(result: Sampled) -> bytes:
    """A ``SampleResponse``."""
    response = pb.SampleResponse(
        sequences=[_sequence(one) for one in result.sequences],
        prompt_logprobs=None if result.prompt is None else _floats(result.prompt),
        topk_prompt_logprobs=None if result.prompt_top is None else _top(result.prompt_top),
        prompt_cache_hit_tokens=result.cached_tokens,
    )
    return bytes(response.SerializeToString())


def _sequence(one: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_LENGTH if one.is_cut else pb.STOP_REASON_STOP,
        tokens=np.asarray(one.tokens, dtype="<i4").tobytes(),
        logprobs=_floats(one.logprobs),
        topk_sampled_logprobs=None if one.top is None else _top(one.top),
    )


def _top(rows: Top) -> pb.TopkLogprobs:
    width = max((len(row) for row in rows), default=0)
    ids = np.full((len(rows), width), NO_TOKEN, dtype="<i4")
    logprobs = np.full((len(rows), width), NO_LOGPROB, dtype="<f4")
    for place, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row):
            ids[place, rank], logprobs[place, rank] = token, logprob
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(rows))


def _floats(values: Sequence[float] | NDArray[np.float32]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()
