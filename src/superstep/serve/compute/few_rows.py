"""Products of few rows, as decoding makes them, with operations that are compiled here.

Their time is that of reading the weight, which lies as the model has it: the op reads it in order, once for all rows.
For more rows torch's products are better.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from superstep.serve.compute.kernels.build import Built
from superstep.serve.compute.linears import Pack, Product
from superstep.serve.compute.quantize import Format

FEW = 8
"""Rows up to which the compiled product is the faster one."""

INPUTS_BF16, INPUTS_8 = 32, 64
"""The compiled products take so many inputs at a time."""


def few_rows(built: Built, many: Pack) -> Pack:
    """How bf16 weights are laid out: for few rows as they are, for more as ``many`` does. Weights of other dtypes, and
    those of an odd number of inputs, are laid out for ``many`` alone.

    Args:
        built: ``products``.
        many: lays out for many rows.
    """
    if built.ops is None or not built.ops.has_bf16():
        return many

    def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Product | None:
        large = many(weight_OI, bias_O)
        if not _fits(weight_OI, INPUTS_BF16) or large is None:
            return large
        held_OI = weight_OI.clone(memory_format=torch.contiguous_format)
        bias = None if bias_O is None else bias_O.float()
        return _by_rows(lambda rows: built.ops.bf16_product(rows, held_OI, bias), large)

    return pack


def few_rows_of_8_bits(built: Built, row: Format) -> Pack:
    """The same for weights and inputs of 8 bits; ``row`` is that format, and what makes its products for many rows."""
    if built.ops is None or not built.ops.has_int8():
        return row.pack

    def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Product | None:
        if not _fits(weight_OI, INPUTS_8):
            return row.pack(weight_OI, bias_O)
        held = row.encode(weight_OI)
        scale_O, sums_O = held.scale[:, 0].float(), held.codes.sum(1, dtype=torch.int32)
        bias = None if bias_O is None else bias_O.float()
        return _by_rows(
            lambda rows: built.ops.int8_product(rows, held.codes, scale_O, sums_O, bias), row.product(held, bias_O)
        )

    return pack


def _fits(weight_OI: Tensor, inputs: int) -> bool:
    is_cpu = weight_OI.device.type == "cpu"
    return is_cpu and weight_OI.dtype == torch.bfloat16 and weight_OI.shape[1] % inputs == 0


def _by_rows(few: Callable[[Tensor], Tensor], many: Product) -> Product:
    def product(x: Tensor) -> Tensor:
        inputs = x.shape[-1]
        if x.numel() > FEW * inputs:
            return many(x)
        return few(x.reshape(-1, inputs).contiguous()).view(*x.shape[:-1], -1)

    return product
