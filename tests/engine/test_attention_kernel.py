"""Which kernel computes attention, as a run says when it begins, and where it takes tensors to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import small
from superstep.comm.device import Device
from superstep.engine.attention.choose_attention import is_compiled, kernel_of
from superstep.engine.layers.fused import layer_kernels
from superstep.kernels import attention, triton_loader
from superstep.kernels.compile_cpp import BuildResult
from superstep.plan.resolution.resolve import resolve

GPU, CPU = Device("cuda", 0), Device("cpu")


@pytest.fixture(autouse=True)
def asked_anew():
    forget = triton_loader.missing.cache_clear
    forget()
    yield
    forget()


def run(*, kernels="auto", exact=False, **numerics):
    config = small.config(packed=False, exact=exact)
    return resolve(replace(config, numerics=replace(config.numerics, kernels=kernels, **numerics)))


@pytest.fixture
def capability(monkeypatch):
    """Of the GPU that is not there, with Triton installed."""
    monkeypatch.setattr(triton_loader.importlib.util, "find_spec", lambda name: object())

    def has(*found):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)

    return has


def test_a_gpu_with_triton_has_tritons_where_asked_for(capability):
    capability(9, 0)
    assert kernel_of(run(kernels="triton"), GPU) == "in Triton"
    assert is_compiled(run(kernels="triton"), GPU)


def test_layers_have_tritons_where_attention_has(capability):
    capability(9, 0)
    assert layer_kernels(run(kernels="triton"), GPU) == "triton"
    assert layer_kernels(run(), GPU) == layer_kernels(run(exact=True), GPU) == "torch"
    triton_loader.missing.cache_clear()
    capability(7, 5)
    assert layer_kernels(run(kernels="triton"), GPU) == "torch"


def test_a_gpu_has_torchs_unless_tritons_are_asked_for(monkeypatch):
    monkeypatch.setattr(triton_loader, "missing", lambda device: pytest.fail("it was looked for"))
    assert kernel_of(run(), GPU) == "by torch"
    assert not is_compiled(run(), GPU)


def test_an_older_gpu_has_torchs(capability):
    capability(7, 5)
    assert kernel_of(run(kernels="triton"), GPU) == "by torch (compute capability 7.5 is below 8.0)"
    assert not is_compiled(run(kernels="triton"), GPU)


def test_without_triton_a_gpu_has_torchs(monkeypatch):
    monkeypatch.setattr(triton_loader.importlib.util, "find_spec", lambda name: None)
    assert kernel_of(run(kernels="triton"), GPU) == "by torch (Triton is not installed)"
    assert not is_compiled(run(kernels="triton"), GPU)


def test_who_asks_for_torchs_gets_it_and_nothing_is_looked_for(monkeypatch):
    monkeypatch.setattr(attention, "compile_library", lambda: pytest.fail("it was compiled"))
    monkeypatch.setattr(triton_loader, "missing", lambda device: pytest.fail("it was looked for"))
    for device in (GPU, CPU):
        assert kernel_of(run(kernels="torch"), device) == "by torch"
        assert not is_compiled(run(kernels="torch"), device)
        assert kernel_of(run(exact=True), device) == "in exact mode"
        assert not is_compiled(run(exact=True), device)


def test_a_cpu_has_the_one_in_cpp_where_it_compiles(monkeypatch):
    monkeypatch.setattr(attention, "compile_library", lambda: BuildResult(None, "there is no compiler"))
    assert kernel_of(run(), CPU) == "by torch (there is no compiler)"
    monkeypatch.setattr(attention, "compile_library", lambda: BuildResult(SimpleNamespace()))
    assert kernel_of(run(), CPU) == kernel_of(run(kernels="triton"), CPU) == "in C++"


@pytest.mark.parametrize(("has_tiles", "told"), [(True, "in C++ by AMX"), (False, "in C++")])
def test_tiles_are_told_of_where_bf16_is_multiplied_by_them(monkeypatch, has_tiles, told):
    monkeypatch.setattr(attention, "compile_library", lambda: BuildResult(SimpleNamespace()))
    monkeypatch.setattr("superstep.engine.attention.choose_attention.has_tiles", lambda: has_tiles)
    assert kernel_of(run(compute="bf16"), CPU) == told
    assert kernel_of(run(), CPU) == "in C++"


def test_tensors_of_a_gpu_go_to_tritons(monkeypatch):
    told = []
    gpu = SimpleNamespace(
        VisibleKeys=lambda **keys: keys,
        takes=lambda *tensors: len(tensors) == 3,
        attend=lambda q, k, v, keys: told.append(keys) or (q, q),
        attend_backward=lambda grad, inputs, out, lse, keys: told.append(keys) or (*inputs, None),
    )
    monkeypatch.setattr(triton_loader, "module", {"attention": gpu}.__getitem__)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 8, 7, device="cuda") for _ in range(3))
        starts = torch.zeros(1, 8, dtype=torch.int64)
        assert attention.takes(q, k, v)
        assert not attention.takes(q)
        assert attention.attend(q, k, v, is_causal=True, starts_BS=starts)[0] is q
        given = attention.attend_backward(q, (q, k, v), q, q, is_causal=False)
        assert all(a is b for a, b in zip(given, (q, k, v), strict=True))
    keys = {"is_causal": True, "starts": starts, "bias": None}
    assert told == [keys, {"is_causal": False, "starts": None, "bias": None}]
