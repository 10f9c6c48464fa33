"""Tinker's protobuf messages: read and written as its SDK writes and reads them, and no body breaks the reader."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.errors import DataError
from superstep.tune.tinker import tinker_pb2
from superstep.tune.tinker.losses import find_loss, make_sequence
from superstep.tune.tinker.proto_messages import (
    Datum,
    Sampled,
    SampledSequence,
    read_forward_backward,
    write_output,
    write_sampled,
)

tinker = pytest.importorskip("tinker", reason="the official client is not installed")

from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as public  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import deserialize_proto_response  # noqa: E402

BYTES, MESSAGE, INT32, INT64 = 12, 11, 5, 3
SAME_ON_THE_WIRE = {(BYTES, MESSAGE), (INT64, INT32)}
"""Types of a field here and in the SDK: a message that is not read is bytes, a number that is read may be wider."""

FLOATS = st.floats(-1e6, 1e6, width=32)


@st.composite
def data(draw):
    """Sequences as a client gives them."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200))
        some = st.lists(FLOATS, min_size=len(tokens), max_size=len(tokens))
        inputs = {"target_tokens": tokens[::-1], "weights": draw(some), "advantages": draw(some)}
        chunks = [types.EncodedTextChunk(tokens=tokens[:3]), types.EncodedTextChunk(tokens=tokens[3:])]
        found.append(types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs))
    return found


@given(
    data=data(),
    seq_id=st.integers(0, 2**31 - 1),
    config=st.dictionaries(st.text(min_size=1), st.one_of(st.floats(allow_nan=False), st.text()), max_size=3),
    forward_only=st.booleans(),
)
def test_what_the_sdk_writes_is_read(data, seq_id, config, forward_only):
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config),
        model_id="m:train:0",
        seq_id=seq_id,
    )
    message = forward_backward_request_to_proto(asked)
    message.forward_only = forward_only
    found = read_forward_backward(message.SerializeToString())
    assert (found.model_id, found.seq_id, found.loss_fn) == ("m:train:0", seq_id, "ppo")
    assert found.forward_only == forward_only
    assert found.config == config
    for mine, theirs in zip(found.data, data, strict=True):
        assert list(mine.tokens) == theirs.model_input.to_ints()
        assert {name: values.tolist() for name, values in mine.inputs.items()} == {
            name: list(tensor.data) for name, tensor in theirs.loss_fn_inputs.items()
        }


def test_settings_of_an_older_sdk_are_read():
    message = public.ForwardBackwardRequest(loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9})
    assert read_forward_backward(message.SerializeToString()).config == {"clip_low_threshold": 0.9}


@given(st.lists(st.lists(FLOATS, max_size=9), min_size=1, max_size=4), st.dictionaries(st.text(), FLOATS, max_size=3))
def test_what_came_of_sequences_is_read_by_the_sdk(rows, metrics):
    body = write_output([np.array(row, dtype=np.float32) for row in rows], metrics)
    found = deserialize_proto_response(body, types.ForwardBackwardOutput)
    assert [list(one["logprobs"].data) for one in found.loss_fn_outputs] == rows
    assert found.metrics == metrics


def test_answers_are_read_by_the_sdk():
    drawn = [
        SampledSequence(tokens=[5, 2**31 - 1], logprobs=[-0.5, -2.0], is_cut=True, top=[((7, -0.1), (8, -0.2)), ()]),
        SampledSequence(tokens=[], logprobs=[], is_cut=False),
    ]
    sampled = Sampled(sequences=drawn, prompt=[math.nan, -1.5], prompt_top=[(), ((3, -0.25),)], cached_tokens=300)
    found = deserialize_proto_response(write_sampled(sampled), types.SampleResponse)
    first, second = found.sequences
    assert (first.stop_reason, list(first.tokens), list(first.logprobs)) == ("length", [5, 2**31 - 1], [-0.5, -2.0])
    assert (second.stop_reason, list(second.tokens)) == ("stop", [])
    assert first.topk_logprobs[0] == [(7, pytest.approx(-0.1)), (8, pytest.approx(-0.2))]
    assert found.prompt_logprobs == [None, -1.5]
    assert found.topk_prompt_logprobs[1] == [(3, -0.25)]
    assert found.prompt_cache_hit_tokens == 300


def field(number, data):
    """A field of bytes as protobuf writes it."""
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


@given(st.binary(max_size=64))
def test_no_body_breaks_the_reader(body):
    for one in (body, field(3, field(2, body)), field(3, field(1, body)), field(7, body)):
        try:
            read_forward_backward(one)
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017 - it may be readable as well


@pytest.mark.parametrize("body", [b"\x1a\xff\xff\xff\xff\x0f", b"\x80" * 11, field(1, b"\xff")])
def test_a_body_that_is_no_message_is_refused(body):
    with pytest.raises(DataError, match="the protobuf body is no ForwardBackwardRequest: Error parsing message"):
        read_forward_backward(body)


def test_fields_have_the_numbers_and_types_of_the_sdk():
    renamed = {"EncodedText": "EncodedTextChunk", "sparse": "sparse_csr", "audio": "dmel"}
    for name, mine in tinker_pb2.DESCRIPTOR.message_types_by_name.items():
        theirs = public.DESCRIPTOR.message_types_by_name[renamed.get(name, name)]
        for each in mine.fields:
            its = theirs.fields_by_name[renamed.get(each.name, each.name)]
            assert (each.number, each.is_repeated) == (its.number, its.is_repeated), f"{name}.{each.name}"
            if each.type != its.type:
                assert (each.type, its.type) in SAME_ON_THE_WIRE, f"{name}.{each.name}"


def test_the_module_is_what_the_proto_file_says():
    source = Path(tinker_pb2.__file__).with_name("tinker.proto").read_text(encoding="utf-8")
    written = re.findall(r"^ +(?:\w+ )?(?:[\w.]+|map<.*>) (\w+) = (\d+);", source, re.MULTILINE)
    messages = tinker_pb2.DESCRIPTOR.message_types_by_name.values()
    fields = [(each.name, str(each.number)) for message in messages for each in message.fields]
    assert sorted(written) == sorted(fields)


def refused(datum, name="cross_entropy"):
    with pytest.raises(DataError) as error:
        make_sequence(datum, 2, name, vocab=64, most_tokens=8)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_sequences_are_held_against_the_loss():
    ids = np.arange(4)
    good = {"target_tokens": ids, "weights": np.ones(4, np.float32)}
    sequence = make_sequence(Datum((1, 2, 3, 4), good), 0, "cross_entropy", vocab=64, most_tokens=8)
    assert sequence.streams.keys() == {"weights"}
    assert refused(Datum((), good)) == "data[2].model_input has 0 tokens; give 1 to 8."
    assert "data[2].model_input holds token 64; token ids of this model are 0 to 63" in refused(
        Datum((1, 2, 3, 64), good)
    )
    lacking = Datum((1, 2, 3, 4), {"target_tokens": ids})
    assert refused(lacking, "ppo") == "data[2].loss_fn_inputs lacks 'logprobs', which ppo reads; add it."
    misspelt = refused(Datum((1, 2, 3, 4), {**good, "weigths": ids}))
    assert "'weigths', which cross_entropy does not read; did you mean 'weights'?" in misspelt
    assert "has shape [3], and the input 4 tokens" in refused(Datum((1, 2, 3, 4), {"target_tokens": ids[:3]}))
    assert "is of float32; token ids" in refused(Datum((1, 2, 3, 4), {"target_tokens": ids.astype(np.float32)}))
    broken = np.array([1, np.nan, 1, 1], np.float32)
    assert "holds NaN or infinity" in refused(Datum((1, 2, 3, 4), {**good, "weights": broken}))


def test_losses_are_named():
    assert find_loss("ppo", {"clip_high_threshold": 1.4})[1].clip_high == pytest.approx(0.4)
    for name, settings, told in (
        ("dro", {}, "loss_fn = 'dro' is not here; choose one of"),
        ("ppo", {"clip_low": 0.1}, "takes clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": 1.5}, "give one of 0 to 1, one of 1 or more"),
        ("ppo", {"clip_low_threshold": "a"}, "give a number"),
        ("cross_entropy", {"beta": 1.0}, "takes nothing"),
    ):
        with pytest.raises(DataError, match=told):
            find_loss(name, settings)


def test_images_are_refused_by_name():
    message = public.ForwardBackwardRequest()
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(DataError, match=r"data\[0\].model_input has a chunk that is an image; this model reads tokens"):
        read_forward_backward(message.SerializeToString())
    message = public.ForwardBackwardRequest()
    message.data.add().loss_fn_inputs["weights"].sparse_csr.values = b"1234"
    with pytest.raises(DataError, match="is sparse; give a dense tensor"):
        read_forward_backward(message.SerializeToString())
