"""Products by either library: the same numbers, whichever is faster, and plain ones where nothing is computed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from superstep.kernels import product as kernel
from superstep.kernels.product import linear, prefers_fp32, prefers_onednn, product, product_into
from superstep.numerics.accumulate_product import add_product


class Noted(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def is_onednn(request, monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(kernel, "prefers_onednn", lambda: request.param)
    monkeypatch.setattr(kernel, "prefers_fp32", lambda: False)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_give_the_same_numbers_of_any_layout(is_onednn, dtype):
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((3, 50, 72), (40, 72), (150, 40)))
    rows = x.flatten(0, 1)
    close = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    with Noted() as noted:
        ours = linear(x, weight), product(grad, weight), product(grad.t(), rows)
        into = product_into(torch.empty(150, 72, dtype=dtype), grad, weight, 0.5)
    assert ("_linear_pointwise" in noted.names) == (is_onednn and dtype == torch.float32)
    for found, wanted in zip(ours, (F.linear(x, weight), grad @ weight, grad.t() @ rows), strict=True):
        torch.testing.assert_close(found, wanted, **close)
    torch.testing.assert_close(into, 0.5 * (grad @ weight), **close)
    total = torch.ones(40, 72)
    add_product(total, grad.t(), rows, 2.0)
    torch.testing.assert_close(total, 1 + 2 * (grad.t() @ rows).float(), rtol=2e-2, atol=close["atol"])


@pytest.mark.parametrize(
    ("slab", "narrow"), [(kernel.SLAB, kernel.NARROW), (72 * 7, 1), (72 * 7, 64)], ids=["whole", "columns", "inner"]
)
def test_bf16_in_fp32_is_rounded_once(monkeypatch, slab, narrow):
    monkeypatch.setattr(kernel, "prefers_fp32", lambda: True)
    monkeypatch.setattr(kernel, "SLAB", slab)
    monkeypatch.setattr(kernel, "NARROW", narrow)
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(shape).bfloat16() for shape in ((150, 72), (40, 72), (150, 40)))
    exact = x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double()
    with Noted() as noted:
        ours = linear(x.view(3, 50, 72), weight).flatten(0, 1), product(grad, weight), product(grad.t(), x)
    assert noted.names.count("product_by_fp32") == 3
    for found, wanted in zip(ours, exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 * 1.01 + 1e-5).all()
    into = product_into(torch.empty(150, 72, dtype=torch.bfloat16), grad.float(), weight, 0.5)
    assert ((into.double() - 0.5 * exact[1]).abs() <= exact[1].abs() * 2**-9 * 1.01 + 1e-5).all()
    total = torch.ones(40, 72)
    add_product(total, grad.t(), x, 2.0)
    assert ((total.double() - 1 - 2 * exact[2]).abs() <= 1e-4).all(), "straight into fp32, and not rounded at all"


def test_a_rehearsal_sees_plain_products(monkeypatch):
    monkeypatch.setattr(kernel, "prefers_fp32", lambda: True)
    monkeypatch.setattr(kernel, "prefers_onednn", lambda: True)
    with FakeTensorMode(), Noted() as noted:
        assert linear(torch.empty(4, 8), torch.empty(6, 8)).shape == (4, 6)
        assert product(torch.empty(4, 8), torch.empty(8, 6)).shape == (4, 6)
        assert product(*(torch.empty(dims, dtype=torch.bfloat16) for dims in ((4, 8), (8, 6)))).shape == (4, 6)
    assert noted.names.count("mm") == 3
    assert not {"_linear_pointwise", "product_by_fp32"} & {*noted.names}


@pytest.mark.parametrize("prefers", [prefers_onednn, prefers_fp32])
def test_what_is_faster_is_measured_on_real_numbers_once(prefers):
    prefers.cache_clear()
    with FakeTensorMode(), Noted() as noted:
        found = prefers()
    assert noted.names == []
    assert prefers() is found
    assert prefers.cache_info().misses == 1


def test_nothing_is_multiplied_by_no_rows(is_onednn):
    assert linear(torch.empty(0, 8), torch.ones(6, 8)).shape == (0, 6)
    assert product(torch.ones(4, 0), torch.ones(0, 6)).tolist() == [[0.0] * 6] * 4


def test_whatever_the_number_of_rows_few_sizes_are_multiplied(monkeypatch):
    sizes = set()

    def seen(x, padding):
        out = torch.constant_pad_nd(x, padding)
        sizes.add(len(out))
        return out

    monkeypatch.setattr(kernel.F, "pad", seen)
    right = torch.randn(24, 40).bfloat16().t()
    for rows in range(kernel.NARROW, 1025):
        left = torch.randn(rows, 24 + 16).bfloat16()
        out = kernel.of_any_rows(left, right)
        assert out.shape == (rows, 24)
        if rows % 97 == 0:
            torch.testing.assert_close(out, left @ right, rtol=2e-2, atol=2e-2)
    assert len(sizes) == 4 * 4 + 1, "of an octave four"
    sizes.clear()
    kernel.of_any_rows(torch.randn(100, 40), right.float())
    kernel.of_any_rows(torch.randn(3, 40).bfloat16(), right)
    assert not sizes


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN")
def test_a_factor_with_gaps_between_its_rows_costs_about_the_same():
    """oneDNN multiplies it one number after the other, if it is not copied first: 2,000 times as long."""
    left, whole = torch.randn(128, 800), torch.randn(800, 2, 384)
    strided, dense = whole[:, 0], whole[:, 0].contiguous()

    def time_product(right):
        kernel._onednn(left, right.t())
        begin_s = time.thread_time()
        out = kernel._onednn(left, right.t())
        return time.thread_time() - begin_s, out

    dense_s, wanted = time_product(dense)
    strided_s, out = time_product(strided)
    assert torch.equal(out, wanted)
    assert strided_s < 50 * dense_s
