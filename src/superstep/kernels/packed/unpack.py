"""Unpacking of weights in blocks, by C++ on a CPU, by Triton on a GPU, else by torch: the same bits.

A product with such a weight unpacks it to the dtype of its input first, forward and backward alike, and drops it after:
the graph keeps the blocks. For the rows of a training step the product takes far longer than the unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.kernels import cpu_library, triton_loader
from superstep.kernels.packed.pack import BlockPlace, block_numbers, scales_of, unpack_by_torch
from superstep.plan.block_weights import BLOCK, BLOCK_BYTES, BlockFormat


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A rank's part of a frozen matrix in blocks.

    Attributes:
        blocks: uint8, [O, B · bytes].
        scales: of the whole matrix, as bytes.
        place: of the part in the whole.
        block_format: of the blocks.
    """

    blocks: Tensor
    scales: Tensor
    place: BlockPlace
    block_format: BlockFormat

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The weights: [O, I]."""
        sections = [number for section in self.place.sections for number in section]
        out: Tensor = _unpack(
            self.blocks, self.scales, sections, self.place.first, self.place.blocks, self.block_format, dtype
        )
        return out


Weight = Tensor | PackedWeight
"""A frozen weight as a layer reads it."""


def take_matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix of a weight: itself, or unpacked to ``dtype``."""
    return weight.unpack(dtype) if isinstance(weight, PackedWeight) else weight


def split_weight(weight: Weight) -> tuple[PackedWeight | None, Tensor | None]:
    """The same as a graph keeps it: a packed weight beside the tensors that are saved, a matrix among them."""
    return (weight, None) if isinstance(weight, PackedWeight) else (None, weight)


def multiply_packed(x: Tensor, weight: PackedWeight, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias; the input alone has a gradient."""
    out: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias_O is None else out + bias_O


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight) -> Tensor:  # noqa: ANN401
        ctx.weight = weight
        return F.linear(x, weight.unpack(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return (grad.flatten(0, -2) @ ctx.weight.unpack(grad.dtype)).view(*grad.shape[:-1], -1), None


@torch.library.custom_op("superstep::unpack_blocks", mutates_args=())
def _unpack(
    blocks: Tensor,
    scales: Tensor,
    sections: Sequence[int],
    first: int,
    blocks_of_row: int,
    block_format: str,
    dtype: torch.dtype,
) -> Tensor:
    form = cast(BlockFormat, block_format)
    place = BlockPlace(tuple(zip(sections[::2], sections[1::2], strict=True)), first, blocks_of_row)
    if not _has_kernel(blocks.device, dtype):
        return unpack_by_torch(blocks, scales, place, form, dtype)
    out, blocks, scales_G = _empty(blocks, form, dtype), blocks.contiguous(), scales_of(scales)
    here = out.shape[1] // BLOCK
    for start, rows, number in block_numbers(place):
        part, into = blocks[start : start + rows], out[start : start + rows]
        if blocks.device.type == "cpu":
            cpu_library.run(
                *("unpack_blocks", dtype == torch.bfloat16, block_format == "nf4", part, scales_G, into),
                *(rows, here, number, blocks_of_row),
            )
        else:
            triton_loader.module("packed").unpack_rows(part, scales_G, into, number, blocks_of_row, form)
    return out


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cpu":
        return dtype in cpu_library.DTYPES and cpu_library.is_compiled()
    return device.type == "cuda" and not triton_loader.missing(device)


def _empty(blocks: Tensor, block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    inputs = blocks.shape[1] // BLOCK_BYTES[block_format] * BLOCK
    return blocks.new_empty((blocks.shape[0], inputs), dtype=dtype)


@_unpack.register_fake
def _(
    blocks: Tensor,
    scales: Tensor,
    sections: Sequence[int],
    first: int,
    blocks_of_row: int,
    block_format: BlockFormat,
    dtype: torch.dtype,
) -> Tensor:
    return _empty(blocks, block_format, dtype)
