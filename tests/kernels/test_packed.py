"""Weights packed in blocks of few bits, and unpacked to the same bits by every form."""

import pytest
import torch

from superstep.kernels.packed.pack import NF4, BlockPlace, pack, unpack_by_torch, whole_place
from superstep.kernels.packed.unpack import PackedWeight, multiply_packed
from superstep.plan.block_weights import BLOCK, BLOCK_BYTES, block_sizes

FORMATS = ["nf4", "int8"]


def weights(outputs=300, inputs=640):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.mark.parametrize(("block_format", "bits", "error"), [("nf4", 4.13, 0.0935), ("int8", 8.13, 0.0065)])
def test_a_matrix_has_few_bits_and_a_small_error(block_format, bits, error):
    w = weights()
    blocks, scales = pack(w, block_format)
    sizes = block_sizes(block_format, *w.shape)
    assert (blocks.shape, scales.shape) == ((300, sizes.row), (sizes.scales,))
    assert 8 * (blocks.numel() + scales.numel()) / w.numel() < bits
    unpacked = PackedWeight(blocks, scales, whole_place(*w.shape), block_format).unpack(torch.float32)
    assert (unpacked - w).square().mean().sqrt() < error * w.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_format", FORMATS)
def test_every_part_has_the_bits_of_the_whole(block_format, dtype):
    w = weights()
    blocks, scales = pack(w, block_format)
    whole = unpack_by_torch(blocks, scales, whole_place(*w.shape), block_format, dtype)
    assert torch.equal(PackedWeight(blocks, scales, whole_place(*w.shape), block_format).unpack(dtype), whole)
    columns = slice(3 * BLOCK_BYTES[block_format], 7 * BLOCK_BYTES[block_format])
    part = torch.cat([blocks[20:70, columns], blocks[200:230, columns]])
    found = PackedWeight(part, scales, BlockPlace(((20, 50), (200, 30)), 3, 10), block_format).unpack(dtype)
    rows = torch.cat([whole[20:70], whole[200:230]])
    assert torch.equal(found, rows[:, 3 * BLOCK : 7 * BLOCK])


def test_nf4_takes_the_nearest_level_of_a_block():
    levels = torch.tensor(NF4)
    w = (levels.repeat(4)[None] + 1e-3).clamp(-1, 1)
    blocks, scales = pack(w, "nf4")
    assert torch.allclose(unpack_by_torch(blocks, scales, whole_place(1, 64), "nf4", torch.float32), w, atol=2e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_format", FORMATS)
def test_what_is_no_number_stays_none(block_format, value):
    w = weights()
    w[5, 7] = value
    unpacked = PackedWeight(*pack(w, block_format), whole_place(*w.shape), block_format).unpack(torch.bfloat16)
    assert unpacked[5, 7].isnan()
    assert not unpacked[100:].isnan().any()  # it makes its group of 256 blocks NaN, and no other


@pytest.mark.parametrize("block_format", FORMATS)
def test_zeros_stay_zeros(block_format):
    blocks, scales = pack(torch.zeros(2, 64), block_format)
    assert not PackedWeight(blocks, scales, whole_place(2, 64), block_format).unpack(torch.float32).any()


def test_a_product_passes_the_gradient_of_its_input():
    w, x = weights(96, 128), torch.randn(3, 5, 128, requires_grad=True)
    packed = PackedWeight(*pack(w, "nf4"), whole_place(96, 128), "nf4")
    bias, whole = torch.ones(96), packed.unpack(torch.float32)
    y = multiply_packed(x, packed, bias)
    assert torch.equal(y, torch.nn.functional.linear(x, whole) + bias)
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ whole)
