"""Kernels in Triton on emulated GPUs: the interpreter's numbers, late, and no use of memory that nothing orders."""

import importlib
import importlib.util
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from test_models_on_gpus import TOKENS, config

import small
from pool import RankError
from strict_ranks import SETTINGS, device_module, gpu_of, prove_on_gpus
from superstep.kernels import triton_loader
from superstep.plan.resolution.resolve import resolve
from superstep.strict.load import configure
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = [
    pytest.mark.strict,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def kernel(name):
    """A function of ``kernels/gpu``, in a file of the same name or of another one."""
    file, _, function = name.partition(".")
    return getattr(triton_loader.module(file), function or file)


def inputs():
    numbers = torch.Generator().manual_seed(3)
    return torch.randn(5, 32, generator=numbers), torch.randn(32, generator=numbers)


CALLS = {
    "logits": lambda x, w: kernel("cross_entropy.row_sums")(x, torch.arange(5, device=x.device), 30, 1.0)[0],
    "norm": lambda x, w: kernel("norm.rms_norm")(x, w, 1e-5),
    "swiglu": lambda x, w: kernel("swiglu")(x, x * 2),
}


def gradient(x, w):
    leaf = w.clone().requires_grad_()
    kernel("norm.rms_norm")(x, leaf, 1e-5).sum().backward()
    return leaf.grad


def launch_late(rank, world):
    with gpu_of(rank, world, replace(SETTINGS, order="latest")) as (device, report):
        x, w = inputs()
        on_gpu = x.to(device.torch), w.to(device.torch)
        report()
        late = {name: call(*on_gpu) for name, call in CALLS.items()}
        assert device_module().take_host_waits() == {}, "no launch waits"
        for name, call in CALLS.items():
            assert torch.equal(late[name].cpu(), call(x, w)), name
        assert torch.equal(gradient(*on_gpu).cpu(), gradient(x, w))
        return report().races


def test_kernels_compute_late_what_the_interpreter_does(pool):
    assert pool.run(1, launch_late, timeout_s=60) == [{}]


def use_beside(rank, world, way):
    """What is named where two streams use the input of a kernel."""
    with gpu_of(rank, world, replace(SETTINGS, raises=False)) as (device, report):
        x, other = inputs()[0].to(device.torch), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            kept = kernel("swiglu")(x, x) if way == "both read" else x.mul_(2)
        if way == "ordered":
            torch.cuda.current_stream().wait_stream(other)
        kernel("swiglu")(x, x)
        torch.cuda.synchronize()
        del kept
        races = list(report().races)
        configure(device_module(), SETTINGS)
        return races


@pytest.mark.parametrize("way", ["ordered", "unordered", "both read"])
def test_a_kernel_beside_another_use_of_its_input_is_named(pool, way):
    (races,) = pool.run(1, use_beside, way, timeout_s=60)
    if way == "unordered":
        assert len(races) == 1
        assert races[0].startswith("_forward (superstep/kernels/gpu/swiglu.py:")
        assert re.search(r"reads on stream \d+ bytes that aten::mul\S* \(\S*test_triton_launch.py:\d+", races[0])
    else:
        assert races == []


def launch_wrongly(rank, world):
    with gpu_of(rank, world) as (device, _):
        x = inputs()[0].to(device.torch)
        kernel("swiglu._forward")[5,](x, x, torch.empty_like(x), 32, NUMBERS=3)
        with pytest.raises(RuntimeError) as failed:
            torch.cuda.synchronize()
        return str(failed.value)


def test_a_kernel_that_fails_is_named_with_the_line_of_its_launch(pool):
    (why,) = pool.run(1, launch_wrongly, timeout_s=60)
    assert re.search(r"^_forward \(\S*test_triton_launch.py:\d+.*\): .*power of 2", why), why


USES = {
    "cross_entropy._sums": ("logits targets", "lse score"),
    "cross_entropy._gradients": ("targets lse factor", "logits"),
    "norm._backward": ("x weight inverse grad", "dx dweight"),
    "attention_forward.attention_forward": ("q k v starts bias", "out lse"),
    "attention_backward.attention_queries_backward": ("grad q k v lse delta starts bias", "dq dbias"),
    "attention_backward.attention_keys_backward": ("grad q k v lse delta starts stops bias", "dk dv"),
}
"""What kernels read, and what they write: their helpers load what their texts hand on."""


def stores(rank, world):
    use = importlib.import_module("superstep.strict.triton.triton_stores").parameter_use
    return {name: (use(kernel(name).fn).stored, kernel(name).arg_names) for name in USES}


def test_what_a_kernel_writes_is_read_from_its_text(pool):
    for name, (stored, every) in pool.run(1, stores, timeout_s=60)[0].items():
        read, written = (set(names.split()) for names in USES[name])
        assert read | written <= set(every), name
        assert written <= stored, name
        assert not read & stored, name


def tiny():
    """A run of two sequences, which attends by our kernels."""
    run = config(kernels="triton", layers=2, sequences=2, microbatch=1)
    return resolve(run), small.batches(tokens=TOKENS, sequences=2, steps=1, packed=False)


def train(rank, world, run, batches, folder):
    device_module().record(True)
    first, observed = prove_on_gpus(rank, world, run, batches, folder)
    device_module().record(False)
    return first, observed.races, {event.what.partition(" ")[0] for event in observed.trace}


def test_a_model_that_attends_by_them_has_the_cpus_losses_and_gradients(pool, tmp_path):
    run, batches = tiny()
    write_reference(run.shape, run.config.train, batches, tmp_path)
    ((first, races, ran),) = pool.run(1, train, run, batches, tmp_path, timeout_s=100)
    assert first is None
    assert races == {}
    assert {"attention_forward", "attention_delta", "attention_queries_backward", "attention_keys_backward"} <= ran


def train_unordered(rank, world, *given):
    """Attention runs on a stream of its own, and what comes after it waits for nothing."""
    attention = triton_loader.module("attention")
    attend = attention.attend

    def attend_beside(*args):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return attend(*args)

    with mock.patch.object(attention, "attend", attend_beside):
        return prove_on_gpus(rank, world, *given)


def test_a_use_of_a_kernels_output_that_nothing_orders_is_named(pool, tmp_path):
    run, batches = tiny()
    write_reference(run.shape, run.config.train, batches, tmp_path)
    race = r"race: .* reads on stream \d+ bytes that attention_forward \(superstep/kernels/gpu/attention.py:\d+"
    with pytest.raises(RankError, match=race):
        pool.run(1, train_unordered, run, batches, tmp_path, timeout_s=100)
