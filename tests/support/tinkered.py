"""A tiny model behind Tinker's verbs, and what its own client is asked to do with it."""

from contextlib import contextmanager

import pytest
from safetensors.torch import load_file, save_file

from model_folder import write_folder
from served import served
from superstep.comm.device import Device
from superstep.model.files.hf import FILE
from superstep.tune.tinker.app import make_app
from superstep.tune.tinker.open_service import open_service

tinker = pytest.importorskip("tinker", reason="the official client is not installed")

from tinker import types  # noqa: E402

WAIT_S = 120
ADAM = types.AdamParams(learning_rate=0.01)
TOKENS = list(range(10, 34))


@contextmanager
def running(config, key=None):
    """A server of a folder, and its address; its threads are gone afterwards."""
    service = open_service(config, Device("cpu"))
    try:
        with served(make_app(service, key=key)) as server:
            yield service, server.url
    finally:
        service.desk.close()


def write_base(folder):
    """The model's folder. Its embedding, which is its head, is large: adapters do not change that, and with a small one
    nothing could become likely.
    """
    made = write_folder(folder)
    tensors = load_file(made / FILE)
    for name, tensor in tensors.items():
        tensor *= 1.5 if "embed" in name else 0.5 if tensor.dim() > 1 else 1
    save_file(tensors, made / FILE)
    return made


@contextmanager
def quietly():
    """Nothing is told to anybody, and nobody's keys are used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("TINKER_API_KEY", "tml-any")
        patch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
        yield patch


def datum(tokens=TOKENS, **inputs):
    given = {"target_tokens": tokens[1:]} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def learn(model, data, loss="cross_entropy", config=None):
    """A step; what came of the sequences and of the update. Both are asked for before either is waited for."""
    found = model.forward_backward(data, loss, config)
    updated = model.optim_step(ADAM)
    return found.result(timeout=WAIT_S), updated.result(timeout=WAIT_S)


def logprobs(model, data):
    found = model.forward(data, "cross_entropy").result(timeout=WAIT_S)
    return [one["logprobs"].to_numpy() for one in found.loss_fn_outputs]
