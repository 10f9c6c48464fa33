"""Moments in 8 bits: the maps are Dettmers' (2021), and C++ has the bits of torch."""

from __future__ import annotations

import pytest
import torch

from superstep.kernels.blocks import adamw
from superstep.kernels.blocks.dynamic_map import LEAST_SCALE, SIZE, decode, dynamic_map, encode
from superstep.numerics.narrow import narrow_update
from superstep.numerics.narrow.narrow_update import BlockMoment, NarrowPart, update_narrow
from superstep.numerics.update_rules import RULES, OptimizerSettings, UpdateNumbers

SETTINGS = OptimizerSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
COUNT = 40 * SIZE


def published(*, is_signed):
    """The values of the paper's maps, as its authors' bitsandbytes builds them."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if is_signed else 2 ** (decade + 1)
        borders = torch.linspace(0.1, 1, parts + 1, dtype=torch.float64)
        means = (10.0 ** (decade - 6) * (borders[1:] + borders[:-1]) / 2).tolist()
        values += means + ([-mean for mean in means] if is_signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


def drawn(count=COUNT, *, is_signed=True):
    """Numbers over many decades."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(3).exp()
    return x if is_signed else x.abs()


def stored(numbers, *, is_signed):
    """The codes and scales of numbers."""
    codes, scales = torch.empty(len(numbers), dtype=torch.uint8), torch.empty(len(numbers) // SIZE)
    encode(numbers, codes, scales, dynamic_map(is_signed=is_signed))
    return codes, scales


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_map_has_the_values_of_the_paper(is_signed):
    torch.testing.assert_close(dynamic_map(is_signed=is_signed).values.double(), published(is_signed=is_signed))


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_number_becomes_the_nearest_value_of_its_block(is_signed):
    numbers, values = drawn(is_signed=is_signed), published(is_signed=is_signed)
    codes, scales = stored(numbers, is_signed=is_signed)
    assert torch.equal(scales, numbers.view(-1, SIZE).abs().amax(1))
    quotients = numbers.double().view(-1, SIZE) / scales.double()[:, None]
    nearest = (quotients.view(-1, 1) - values).abs().amin(1)
    assert ((values[codes.long()] - quotients.view(-1)).abs() <= nearest * (1 + 1e-5) + 1e-7).all()


@pytest.mark.parametrize("is_signed", [True, False])
def test_what_is_decoded_has_its_codes_again(is_signed):
    codes, scales = torch.arange(SIZE, dtype=torch.uint8), torch.tensor([0.7])
    again = stored(decode(codes, scales, dynamic_map(is_signed=is_signed)), is_signed=is_signed)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_makes_its_block_nan_and_no_other(is_signed, bad):
    numbers = drawn(3 * SIZE, is_signed=is_signed)
    numbers[SIZE + 7] = bad
    back = decode(*stored(numbers, is_signed=is_signed), dynamic_map(is_signed=is_signed)).view(3, SIZE)
    assert back.isnan().any(1).tolist() == back.isnan().all(1).tolist() == [False, True, False]


def test_a_block_of_zeros_or_of_tiny_numbers_is_zero():
    numbers = torch.cat([torch.zeros(SIZE), torch.full((SIZE,), LEAST_SCALE / 2), torch.full((SIZE,), LEAST_SCALE)])
    back = decode(*stored(numbers, is_signed=False), dynamic_map(is_signed=False))
    assert torch.equal(back, torch.where(numbers < LEAST_SCALE, 0.0, numbers))


def fresh():
    """A part of a parameter, and moments of zero."""
    moments = {}
    for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes = torch.full((COUNT,), dynamic_map(is_signed=is_signed).zero, dtype=torch.uint8)
        moments[name] = BlockMoment(codes, torch.zeros(COUNT // SIZE))
    return NarrowPart(drawn(), torch.zeros(COUNT), moments, draw=None)


def updated(bad=None):
    """A part after some updates; one gradient of the last may be ``bad``."""
    part, generator = fresh(), torch.Generator().manual_seed(1)
    for number in range(1, 6):
        torch.randn(COUNT, generator=generator, out=part.grad).pow_(3)
        part.grad[: SIZE * number] = 0
        if bad is not None and number == 5:
            part.grad[-1] = bad
        now = UpdateNumbers(lr=1e-2, decay=0.1, scale=1.7, number=number)
        update_narrow(part, RULES["adamw"], SETTINGS, now)
    each = (part.moments[name] for name in ("exp_avg", "exp_avg_sq"))
    return [part.param.view(torch.int32), *(x for m in each for x in (m.codes, m.scales.view(torch.int32)))]


@pytest.mark.skipif(not adamw.has_kernel(torch.device("cpu")), reason="no C++ compiler")
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
def test_the_kernel_has_the_bits_of_torch(bad, monkeypatch):
    by_kernel = updated(bad)
    calls = []
    monkeypatch.setattr(narrow_update, "has_kernel", lambda device: calls.append(device))
    for mine, plain in zip(by_kernel, updated(bad), strict=True):
        assert torch.equal(mine, plain)
    assert calls


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_in_a_gradient_come_out_as_nan(bad):
    param, _, first_scales, _, second_scales = updated(bad)
    assert param.view(torch.float32).isnan().nonzero().tolist() == [[COUNT - 1]]
    for scales in (first_scales, second_scales):
        assert scales.view(torch.float32).isnan().nonzero().tolist() == [[COUNT // SIZE - 1]]


def test_an_update_in_8_bits_stays_near_that_of_fp32():
    part = fresh()
    param, moments = part.param.clone(), [torch.zeros(COUNT) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for number in range(1, 21):
        torch.randn(COUNT, generator=generator, out=part.grad)
        now = UpdateNumbers(lr=1e-2, decay=0.1, scale=1.0, number=number)
        RULES["adamw"].update(param, part.grad, moments, SETTINGS, now)
        update_narrow(part, RULES["adamw"], SETTINGS, now)
    apart = (part.param - param).norm() / (20 * 1e-2 * COUNT**0.5)
    assert apart < 0.02
