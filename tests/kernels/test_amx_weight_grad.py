"""A weight's gradient by tiles against the plain product in fp64."""

from __future__ import annotations

import pytest
import torch

from superstep.kernels import amx_weight_grad, compile_cpp, cpu_library
from superstep.kernels.attention import FLAGS
from superstep.model.mixture.experts import add_outer_products
from superstep.numerics.accumulate_product import add_product

SIZES = [(1024, 96, 64), (257, 32, 1056), (37, 160, 32), (1, 64, 544), (300, 544, 512), (0, 64, 32)]
"""Tokens, outputs, inputs: of each more than a block, less than one, and a part of the last."""


@pytest.fixture(params=["native", "x86-64-v3"])
def processor(request, monkeypatch, tmp_path_factory):
    """As it is compiled for this processor, and as one without AVX-512 has it."""
    if request.param != "native":
        others = {"-march=native": f"-march={request.param}", "-O3": "-O1"}
        flags = tuple(others.get(flag, flag) for flag in FLAGS)
        built = compile_cpp.build(cpu_library.SOURCES, flags, tmp_path_factory.getbasetemp() / "kernels")
        monkeypatch.setattr(cpu_library, "compile_library", lambda: built)
    if cpu_library.compile_library().library is None:
        pytest.skip(cpu_library.compile_library().why)


def tables(tokens, outputs, inputs):
    """A buffer, and slices of larger tables: a row of each begins anywhere."""
    torch.manual_seed(5)
    into = torch.randn(outputs, inputs + 7)[:, 3 : 3 + inputs]
    grad = torch.randn(tokens, outputs + 6).bfloat16()[:, 2 : 2 + outputs].t()
    x = torch.randn(tokens, 2 * inputs).bfloat16()[:, inputs:]
    return into, grad, x


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_it_adds_the_product_in_fp32(processor, sizes, scale):
    into, grad, x = tables(*sizes)
    wanted = into.double()
    amx_weight_grad.reference(wanted, grad, x, scale)
    amx_weight_grad.add(into, grad, x, scale)
    size = sizes[0] ** 0.5 * scale + 1
    assert float((into - wanted).abs().max()) < 2e-6 * size


def test_an_expert_without_rows_gets_nothing():
    """Whatever another's sums have left in memory."""
    into, (_, grad, x) = torch.zeros(2, 544, 512), tables(*SIZES[4])
    for _ in range(3):
        add_outer_products(into, grad.t(), x, torch.tensor([len(x), 0]))
    assert into[0].any()
    assert not into[1].any()


def test_threads_change_no_bit(processor, monkeypatch):
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        into, grad, x = tables(*SIZES[0])
        amx_weight_grad.add(into, grad, x)
        found.append(into)
    assert torch.equal(*found)


def test_other_tensors_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(amx_weight_grad, "has_tiles", lambda: True)
    into, grad, x = torch.zeros(64, 32), torch.zeros(5, 64).bfloat16().t(), torch.zeros(5, 32).bfloat16()
    assert amx_weight_grad.takes(into, grad, x)
    assert not amx_weight_grad.takes(into.double(), grad, x)
    assert not amx_weight_grad.takes(into, grad.float(), x.float())
    assert not amx_weight_grad.takes(into[:, :24], grad, x[:, :24])
    assert not amx_weight_grad.takes(into, grad.contiguous(), x)
    assert not amx_weight_grad.takes(into.to("meta"), grad.to("meta"), x.to("meta"))
    monkeypatch.setattr(amx_weight_grad, "has_tiles", lambda: False)
    assert not amx_weight_grad.takes(into, grad, x)


def test_a_gradient_is_rounded_nowhere_where_there_are_tiles():
    """Torch's product of bf16 is rounded to bf16: by a thousandth of its size in the mean."""
    if not amx_weight_grad.has_tiles():
        pytest.skip("this processor has no AMX")
    into, grad, x = tables(512, 64, 64)
    wanted = into.double()
    amx_weight_grad.reference(wanted, grad, x)
    add_product(into, grad, x)
    assert float((into - wanted).norm() / wanted.norm()) < 1e-6
