"""Sums on a grid, and products in pieces: the same bits whatever the order and the cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.numerics import invariant_matmul as pieces
from superstep.numerics.exact_self_check import first_difference
from superstep.numerics.fixed_point import (
    ACTIVATION,
    PARAMETER,
    OutOfRange,
    RangeExcess,
    exact_loss_sum,
    from_square_sum,
    require_exact_loss,
    square_sum,
)
from superstep.numerics.invariant_matmul import product, tree_sum


def _numbers(count, seed=0, spread=12):
    """Of many sizes, so that the order of a floating-point sum shows."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=random) * torch.exp2(torch.randint(-spread, 2, (count,), generator=random))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 40))
def test_a_sum_on_the_grid_has_no_order_and_no_cut(seed, parts):
    values = _numbers(1000, seed)
    shuffled = values[torch.randperm(1000, generator=torch.Generator().manual_seed(seed))]
    whole, ranks = torch.zeros(1, dtype=torch.int64), torch.zeros(parts, dtype=torch.int64)
    for value in values.split(1):
        PARAMETER.add(whole, value.clone())
    for number, value in enumerate(shuffled.split(1)):
        PARAMETER.add(ranks[number % parts :][:1], value.clone())
    assert whole.item() == ranks.sum().item()
    exact = math.fsum(values.tolist())
    assert PARAMETER.take(whole).item() == pytest.approx(exact, abs=1000 * 2.0**-PARAMETER.bits, rel=2e-7)


@pytest.mark.parametrize("grid", [PARAMETER, ACTIVATION])
def test_what_is_large_enough_loses_nothing_on_the_grid(grid):
    values = _numbers(10_000)
    values = values[values.abs() >= 2.0 ** (24 - grid.bits)]
    assert torch.equal(grid.take(grid.put_(values.clone())), values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), PARAMETER.limit, -2 * PARAMETER.limit])
def test_what_the_grid_has_no_place_for_is_refused(value):
    values = torch.full((3,), 0.5)
    values[1] = value
    with pytest.raises(
        OutOfRange, match=r"a term of (nan|inf|4.1e\+03|8.19e\+03), and its exact sum has room for 2 terms below 4096"
    ):
        PARAMETER.add(torch.zeros(3, dtype=torch.int64), values)


def test_many_numbers_below_the_limit_are_not_refused_for_their_norm():
    values = torch.full((5000,), PARAMETER.limit / 4)
    assert torch.equal(PARAMETER.take(PARAMETER.put_(values.clone())), values)


def test_a_large_addend_goes_block_by_block_to_the_same_sum():
    values = _numbers(200_000)
    into = torch.ones(200_000, dtype=torch.int64)
    PARAMETER.add(into, values.clone())
    assert torch.equal(into, PARAMETER.put_(values.clone()) + 1)


@settings(max_examples=20)
@given(st.integers(0, 100), st.integers(1, 700))
def test_squares_sum_to_the_same_bits_in_any_cut(seed, cut):
    values = _numbers(1000, seed) * 1e-3
    whole = square_sum(values)
    parts = sum(square_sum(part) for part in values.flip(0).split(cut))
    assert from_square_sum(whole.tolist()) == from_square_sum(parts.tolist())
    assert from_square_sum(whole.tolist()) == pytest.approx(math.fsum(v * v for v in values.tolist()), rel=1e-12)


@pytest.mark.parametrize("terms", [2, 3, 5, 64, 1000, 1 << 22])
@pytest.mark.parametrize("grid", [PARAMETER, ACTIVATION])
def test_as_many_terms_as_can_meet_never_wrap_around(grid, terms):
    found = RangeExcess()
    bounded = grid.of(terms, "the gradient of w", found)
    largest = torch.nextafter(torch.tensor(bounded.limit), torch.tensor(0.0))
    for sign in (1.0, -1.0):
        total = int(bounded.put_(largest[None] * sign)) * terms
        assert abs(total) < 2**63
    assert found.excess_text == ""
    bounded.put_(torch.full((3,), bounded.limit))
    assert found.excess_text.startswith(
        f"the gradient of w has a term of {bounded.limit:.3g}, and its exact sum has room for "
    )


def test_a_sum_of_many_that_would_wrap_around_is_noted():
    """Five of 4000 once gave 3616, and 38.4 in three parts -25.6."""
    for grid, value, times in ((PARAMETER, 4000.0, 5), (ACTIVATION, 12.8, 3)):
        found = RangeExcess()
        bounded, into = grid.of(times, "the gradient of w", found), torch.zeros(1, dtype=torch.int64)
        for _ in range(times):
            bounded.add(into, torch.tensor([value]))
        is_right = float(grid.take(into)) == pytest.approx(value * times)
        assert is_right or f"has a term of {value:.3g}" in found.excess_text


@settings(max_examples=20)
@given(st.integers(1, 3000), st.sampled_from([1.0, 100.0, 1500.0, 4000.0, 8191.0]), st.integers(1, 100))
def test_a_norm_that_would_wrap_around_is_refused_in_every_cut(count, value, cut):
    values = torch.full((count,), value)
    parts = [square_sum(values), sum(square_sum(part) for part in values.split(cut))]
    if count * value**2 < 2**32:
        assert {from_square_sum(part.tolist()) for part in parts} == {count * value**2}
    else:
        for part in parts:
            with pytest.raises(OutOfRange, match="the gradient norm is"):
                from_square_sum(part.tolist())


def test_many_small_squares_do_not_wrap_around():
    """What is below the coarse unit is handed on, so that its sum stays below it however many there are."""
    fine = square_sum(torch.full((200_000,), 2.0**-15.5))[1]
    assert 0 <= int(fine) < 2**30


def test_a_loss_that_would_be_rounded_is_refused():
    assert require_exact_loss(2.0**28) == 2.0**28
    with pytest.raises(OutOfRange, match="the losses of a step sum to"):
        require_exact_loss(2.0**29)


def test_losses_of_tokens_sum_in_any_order():
    nats = _numbers(4096).abs() * 5
    assert exact_loss_sum(nats) == sum(exact_loss_sum(part) for part in nats.flip(0).split(7))
    assert float(exact_loss_sum(nats)) == pytest.approx(math.fsum(nats.tolist()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [24, 256, 704, 1376])
def test_a_product_has_the_bits_of_its_cells_on_any_number_of_ranks(dtype, inner):
    random = torch.Generator().manual_seed(1)
    left, right = torch.randn(48, inner, generator=random).to(dtype), torch.randn(inner, 40, generator=random).to(dtype)
    whole = product(left, right, cells=8)
    for ranks in (2, 4, 8):
        parts = zip(left.chunk(ranks, dim=1), right.chunk(ranks), strict=True)
        assert torch.equal(tree_sum([product(a, b, cells=8 // ranks) for a, b in parts]), whole)
    assert torch.equal(product(left[:3], right, cells=8), whole[:3])
    assert torch.equal(product(left, right[:, 8:13], cells=8), whole[:, 8:13])
    expected = left.double() @ right.double()
    error = float((whole.double() - expected).norm() / expected.norm())
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


def test_a_tree_needs_a_power_of_two():
    with pytest.raises(AssertionError):
        tree_sum([torch.ones(1)] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine_keeps_what_exact_mode_builds_on(dtype):
    assert first_difference(dtype, torch.device("cpu")) is None


def test_the_self_check_sees_a_machine_that_does_not(monkeypatch):
    """Without pieces an Intel processor's library differs, without whole columns an AMD's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(pieces, "PIECE", 4096)
    monkeypatch.setattr(pieces, "COLUMNS", 1)
    monkeypatch.setattr("superstep.numerics.exact_self_check.INNER", (1376,))
    found = first_difference(torch.float32, torch.device("cpu"))
    torch.set_num_threads(threads)
    assert found is not None
    assert "product over 1376" in found
