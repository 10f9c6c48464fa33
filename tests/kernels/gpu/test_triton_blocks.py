"""AdamW of moments in 8 bits by Triton: the bits of torch on a CPU."""

from __future__ import annotations

import pytest
import torch

from superstep.kernels.blocks.adamw import AdamWNumbers, BlockMoment
from superstep.kernels.blocks.dynamic_map import SIZE, decode, dynamic_map, encode
from superstep.kernels.gpu import blocks

COUNT = 6 * SIZE
NUMBERS = AdamWNumbers(
    scale=1.7, beta1=0.9, rest1=0.1, beta2=0.95, rest2=0.05, root_by=1.25, eps=1e-8, keep=0.999, rate=1e-3
)


def by_torch(param, grad, moments):
    """The update in plain torch, with roots that are rounded correctly."""
    wide = [decode(m.codes, m.scales, dynamic_map(is_signed=s)) for m, s in moments]
    g, (m, v), by = grad / NUMBERS.scale, wide, NUMBERS
    m.mul_(by.beta1).add_(g * by.rest1)
    v.mul_(by.beta2).add_((g * g).mul_(by.rest2))
    size = v.double().sqrt().float().mul_(by.root_by).add_(by.eps)
    param.mul_(by.keep).sub_((m / size).mul_(by.rate))
    for x, (moment, is_signed) in zip(wide, moments, strict=True):
        encode(x, moment.codes, moment.scales, dynamic_map(is_signed=is_signed))


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_an_update_has_the_bits_of_torch(device, bad):
    generator = torch.Generator().manual_seed(0)
    mine = [
        (BlockMoment(torch.full((COUNT,), 127 if s else 0, dtype=torch.uint8), torch.zeros(COUNT // SIZE)), s)
        for s in (True, False)
    ]
    plain = [(BlockMoment(m.codes.clone(), m.scales.clone()), s) for m, s in mine]
    mine = [(BlockMoment(m.codes.to(device), m.scales.to(device)), s) for m, s in mine]
    param = torch.randn(COUNT, generator=generator)
    there = param.clone().to(device)
    for number in range(3):
        grad = torch.randn(COUNT, generator=generator).pow(3)
        grad[:SIZE] = 0
        grad[-1] = bad if number == 2 else 1.0
        blocks.update_blocks(there, grad.to(device), mine[0][0], mine[1][0], NUMBERS)
        by_torch(param, grad, plain)
    pairs = [(there, param), *((a.codes, b.codes) for (a, _), (b, _) in zip(mine, plain, strict=True))]
    pairs += [(a.scales, b.scales) for (a, _), (b, _) in zip(mine, plain, strict=True)]
    for got, expected in pairs:
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
