"""Products and sums of rows whose bits do not depend on what is computed beside them."""

import pytest
import torch

from superstep.kernels.gpu.invariant import product, row_sum

SIZES = (1, 2, 7, 64, 65)


def is_same(device, one, other):
    """Whether the bits are the same. Triton's interpreter multiplies by NumPy, whose bits depend on memory layout."""
    return torch.equal(one, other) if device == "cuda" else torch.allclose(one, other, atol=1e-5)


def drawn(device, dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [8, 176, 256])
def test_an_element_of_a_product_has_the_same_bits_beside_few_and_many(device, dtype, inner):
    left, right = drawn(device, dtype, 192, inner), drawn(device, dtype, inner, 192)
    whole = product(left, right)
    for size in SIZES:
        assert is_same(device, product(left[:size], right), whole[:size])
        assert is_same(device, product(left, right[:, -size:]), whole[:, -size:])
    # As layers have them: weights and gradients transposed, several products side by side.
    assert is_same(device, product(left, right.t().contiguous().t()), whole)
    assert is_same(device, product(left.t().contiguous().t(), right), whole)
    both = product(torch.stack((left, left)), torch.stack((right, right)))
    assert is_same(device, both[0], whole)
    assert is_same(device, both[1], whole)
    added = product(left, right, whole.clone())
    assert is_same(device, added, whole + whole)
    exact = left.double() @ right.double()
    assert whole.dtype == torch.float32
    assert (whole.double() - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize("columns", [1, 256, 1500])
def test_a_rows_sum_has_the_same_bits_beside_few_and_many(device, columns):
    rows = drawn(device, torch.float32, 192, columns)
    whole = row_sum(rows)
    for size in SIZES:
        assert is_same(device, row_sum(rows[:size]), whole[:size])
    assert is_same(device, row_sum(rows.t().contiguous().t()), whole)
    torch.testing.assert_close(whole.double(), rows.double().sum(-1, keepdim=True), rtol=1e-5, atol=1e-4)


def test_nothing_is_summed_where_nothing_is(device):
    assert product(drawn(device, torch.float32, 0, 8), drawn(device, torch.float32, 8, 4)).shape == (0, 4)
    assert row_sum(drawn(device, torch.float32, 0, 8)).shape == (0, 1)
