"""The kernels compiled for an H100 that need not be there: what the compiler refuses, or has no registers for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled by an interpreter", allow_module_level=True)

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from superstep.kernels.gpu import attention, cross_entropy, grouped, norm, rope, softmax, swiglu
from superstep.kernels.gpu.adamw import update
from superstep.kernels.gpu.attention import Sees
from superstep.kernels.gpu.matmul import matmul
from superstep.kernels.position_bias import alibi, t5

H100 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
BF16, FP32 = torch.bfloat16, torch.float32
TYPES = {FP32: "*fp32", BF16: "*bf16", torch.int64: "*i64"}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel."""

    name: str
    shared_bytes: int
    spilled_bytes: int


def described(value):
    """An argument's type, as Triton writes it."""
    match value:
        case torch.Tensor():
            return TYPES[value.dtype]
        case tuple():
            return tuple(map(described, value))
        case float():
            return "fp32"
        case _:
            return "i32"


def aligned(at, value):
    """What launches tell the compiler of the arguments: which of them 16 divides."""
    if isinstance(value, tuple):
        return {key: found for number, each in enumerate(value) for key, found in aligned((*at, number), each).items()}
    is_so = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
    return {at: ALIGNED} if is_so else {}


def spilled(assembly, folder):
    """Bytes of registers that are kept in memory."""
    source = folder / "kernel.ptx"
    source.write_text(assembly, encoding="utf-8")
    ptxas = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(said.split("bytes spill stores")[0].split(",")[-1])


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Kernels that are compiled where they would be launched."""
    found = []

    def compile_for(self, *args, grid, warmup, **kwargs):
        constants = {name: value for name, value in kwargs.items() if name in self.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        given = dict(zip(self.arg_names, args, strict=False))
        constants |= {name: value for name, value in given.items() if name.isupper()}
        signature = {name: "constexpr" if name in constants else described(given[name]) for name in self.arg_names}
        attributes = {}
        for at, name in enumerate(self.arg_names):
            attributes |= {} if name in constants else aligned((at,), given[name])
        made = triton.compile(ASTSource(self, signature, constants, attributes), target=H100, options=options)
        found.append(Compiled(self.__name__, made.metadata.shared, spilled(made.asm["ptx"], tmp_path)))

    monkeypatch.setattr(JITFunction, "run", compile_for)
    return found


def fits(found):
    assert [one for one in found if one.shared_bytes > SHARED_BYTES] == []


def attended(width, dtype, sees):
    """Attention forward and backward of tensors without numbers of note."""
    q, k = (torch.empty(2, 64, heads, width, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    out, lse = attention.attend(q, k, k, sees)
    attention.attend_backward(out, (q, k, k), out, lse, sees)


def test_swiglu_compiles(launched):
    x = torch.empty(4, 64, dtype=BF16, requires_grad=True)
    swiglu.swiglu(x, x).sum().backward()
    assert [one.name.rpartition(".")[2] for one in launched] == ["_forward", "_backward"]
    fits(launched)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_small_kernels_compile(launched, dtype):
    x, weight, rows = (torch.empty(shape, dtype=dtype) for shape in ((32, 64), (64, 64), (32,)))
    softmax.softmax(x)
    matmul(x, weight)
    norm.norm_backward(*norm.norm(x, weight[0], 1e-6)[:1], x, weight[0], rows.float())
    rope.turned(x.view(2, 4, 4, 64), *(torch.empty(4, 1, 64) for _ in range(2)))
    cross_entropy.losses_and_slopes(x, torch.zeros(32, dtype=torch.int64))
    flat = torch.empty(64)
    update(flat, flat, (flat, flat), step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, decay=0.1, copy=flat.to(dtype))
    held = torch.tensor([16, 16])
    out = grouped.products(x, weight.expand(2, 64, 64), held)
    grouped.add_outer_products(torch.zeros(2, 64, 64), out, x, held)
    assert len(launched) == 9
    fits(launched)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 80, 128])
def test_attention_keeps_its_registers(launched, width):
    attended(width, BF16, Sees())
    assert len(launched) == 4
    assert [one for one in launched if one.spilled_bytes > 0] == []
    fits(launched)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dtype"), [(256, BF16), (256, FP32)], ids=["bf16", "fp32"])
def test_attention_of_the_widest_heads_fits(launched, width, dtype):
    attended(width, dtype, Sees())
    fits(launched)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [alibi(4), t5(torch.zeros(4, 32))], ids=["alibi", "t5"])
def test_attention_of_documents_in_windows_compiles(launched, bias):
    starts = torch.zeros(2, 64, dtype=torch.int64)
    attended(64, BF16, Sees(starts=starts, window=100, bias=bias))
    fits(launched)
