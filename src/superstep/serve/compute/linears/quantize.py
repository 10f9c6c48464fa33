"""Quantized weights: a table of formats with 8 or 4 bits, each with its encoding and its product.

The linears of the blocks and the head are quantized, because most of the memory that decoding reads is theirs. The
embedding is not quantized: each token reads one row, so smaller rows save no time, and their error would go through
every layer. In a 4-bit format the head has 8 bits, because its errors go directly into the probabilities.

    int8   w = q · s, one s for each output; products in the model's dtype
    w8a8   the same weights; each token's input is rounded to 8 bits too, so that the products are of integers
    int4   w = (q - 8) · s + z, one s and z for each group of inputs of an output

    O  outputs      I  inputs      T  rows      G  groups of an output
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.errors import ConfigError
from superstep.serve.compute.linears.fused_linears import Product
from superstep.serve.compute.linears.onednn_linear import is_mkldnn_weight, pack_weight

MOST_8 = 127
"""Codes of 8 bits go from -127 to 127, so that a weight and its negative have the same error."""

ZERO_8 = 128
"""The code of an input of 0. Codes of inputs are unsigned: with signed ones oneDNN's product is a thousand times
slower.
"""

MOST_4 = 15
ZERO_4 = 8
"""Codes of 4 bits go from 0 to 15, and 8 stands for the group's ``z``, as in torch's kernels."""

FEW_ROWS = 32
"""Up to this many rows torch's product of 8-bit weights is faster; above, a product of the codes cast to the dtype is.
"""

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that ``to_4_bits`` tries: clipping a few weights may reduce the error of the others."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight.

    Attributes:
        codes: [O, I], int8, or uint8 for 4 bits.
        scale: [O, 1] or [O, G].
        zero: the value of the code ``ZERO_4``, [O, G]; None where the code 0 stands for 0.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def weight(self) -> Tensor:
        """The dequantized weight, fp32: [O, I]."""
        codes = self.codes.float().view(*self.scale.shape, -1)
        if self.zero is None:
            return (codes * self.scale.float()[..., None]).flatten(1)
        return ((codes - ZERO_4) * self.scale.float()[..., None] + self.zero.float()[..., None]).flatten(1)


def to_8_bits(weight_OI: Tensor) -> QuantizedWeight:
    """Codes of 8 bits, one scale for each output. The error of a weight is at most half its scale."""
    weight_OI = weight_OI.float()
    # The scale is rounded up to the kernels' dtype before it is used: then no weight is clipped.
    scale_O1 = _round_up(weight_OI.abs().amax(1, keepdim=True) / MOST_8)
    return QuantizedWeight((weight_OI / scale_O1.float()).round_().clamp_(-MOST_8, MOST_8).to(torch.int8), scale_O1)


def to_4_bits(weight_OI: Tensor, group: int) -> QuantizedWeight:
    """Codes of 4 bits, one scale for each ``group`` inputs. Of the ranges in ``CLIPS``, each group takes the one with
    the least squared error.
    """
    w_OGg = weight_OI.float().unflatten(1, (-1, group))
    low, high = w_OGg.amin(2), w_OGg.amax(2)
    least = torch.full_like(low, torch.inf)
    best = (torch.empty_like(w_OGg), torch.empty_like(low).bfloat16(), torch.empty_like(low).bfloat16())
    for clip in CLIPS:
        middle, half = (high + low) / 2, (high - low) / 2 * clip
        scale = _round_up(2 * half / MOST_4)
        zero = (middle - half + ZERO_4 * scale.float()).bfloat16()
        codes = ((w_OGg - zero.float()[..., None]) / scale.float()[..., None]).round_().add_(ZERO_4).clamp_(0, MOST_4)
        decoded = (codes - ZERO_4) * scale.float()[..., None] + zero.float()[..., None]
        error = (decoded - w_OGg).square_().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better[..., None], codes, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, zero, best[2]),
        )
    codes, scale, zero = best
    return QuantizedWeight(codes.to(torch.uint8).flatten(1), scale, zero)


def _round_up(scale: Tensor) -> Tensor:
    """The scale in bf16, rounded up, and never 0."""
    up = (scale.clamp(min=torch.finfo(torch.bfloat16).tiny) * (1 + 2.0**-8)).bfloat16()
    near = scale.bfloat16()
    return torch.where(near.float() >= scale.clamp(min=torch.finfo(torch.bfloat16).tiny), near, up)


def int8_product(quantized: QuantizedWeight, bias_O: Tensor | None) -> Product:
    """A product of 8-bit weights, in the input's dtype."""
    if quantized.codes.device.type != "cpu":
        return _product_by_decoding(quantized, bias_O)
    codes_OI, scale_O = quantized.codes, quantized.scale[:, 0]

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > FEW_ROWS:
            # The codes are exact in bf16, so the scales can follow the product.
            many = F.linear(x, codes_OI.to(x.dtype)).mul_(scale_O)
            return many if bias_O is None else many + bias_O
        out: Tensor = torch._weight_int8pack_mm(rows, codes_OI, scale_O.to(x.dtype))
        out = out.view(*x.shape[:-1], -1)
        return out if bias_O is None else out + bias_O

    return product


def w8a8_product(quantized: QuantizedWeight, bias_O: Tensor | None) -> Product:
    """A product that rounds each token to 8 bits with its own scale; the sum is of integers, and exact."""
    if not is_mkldnn_weight(quantized.codes):
        return _product_by_decoding(quantized, bias_O)
    ordered = torch.ops.onednn.qlinear_prepack(quantized.codes, None)
    scale_O = quantized.scale[:, 0].float()
    zero_O = torch.zeros(len(scale_O), dtype=torch.int32)

    def product(x: Tensor) -> Tensor:
        codes, scale_T1 = tokens_to_8_bits(x.reshape(-1, x.shape[-1]))
        out = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, ZERO_8, ordered, scale_O, zero_O, None, 1.0, 0, torch.float32, "none", [], ""
        )
        scaled: Tensor = (out * scale_T1).to(x.dtype).view(*x.shape[:-1], -1)
        return scaled if bias_O is None else scaled + bias_O

    return product


def tokens_to_8_bits(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of each row, where ``ZERO_8`` stands for 0, and its scale: [T, I] uint8 and [T, 1] fp32."""
    x_TI = x_TI.float()
    scale_T1 = (x_TI.abs().amax(1, keepdim=True) / MOST_8).clamp_(min=torch.finfo(torch.float32).tiny)
    return (x_TI / scale_T1).round_().add_(ZERO_8).to(torch.uint8), scale_T1


def int4_product(quantized: QuantizedWeight, bias_O: Tensor | None) -> Product:
    """A product of 4-bit weights in groups, in the input's dtype."""
    assert quantized.zero is not None
    if quantized.codes.device.type != "cpu":
        return _product_by_decoding(quantized, bias_O)
    group = quantized.codes.shape[1] // quantized.scale.shape[1]
    ordered = torch._convert_weight_to_int4pack_for_cpu(quantized.codes.int(), 1)
    pairs_GO2 = torch.stack((quantized.scale.t(), quantized.zero.t()), -1).contiguous()

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = torch._weight_int4pack_mm_for_cpu(rows, ordered, group, pairs_GO2.to(x.dtype))
        out = out.view(*x.shape[:-1], -1)
        return out if bias_O is None else out + bias_O

    return product


def _product_by_decoding(quantized: QuantizedWeight, bias_O: Tensor | None) -> Product:
    """A product for devices without a kernel: it saves memory, not time."""

    def product(x: Tensor) -> Tensor:
        return F.linear(x, quantized.weight().to(x.dtype), bias_O)

    return product


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of quantized weights.

    Attributes:
        name: the value of ``serve.quantize``.
        bits: bits of a weight.
        group: inputs that share a scale; None means all inputs of an output.
        activations: bits of the inputs; None if they are not rounded.
        head: the name of the format for the head.
        encode: quantizes a weight.
        product: makes the product.
    """

    name: str
    bits: Literal[8, 4]
    group: int | None
    activations: Literal[8] | None
    head: str
    encode: Callable[[Tensor], QuantizedWeight]
    product: Callable[[QuantizedWeight, Tensor | None], Product]

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None) -> Product | None:
        """A ``Pack`` for ``Linears``. A weight is not quantized if its inputs do not divide into groups."""
        if self.group is not None and weight_OI.shape[1] % self.group:
            return pack_weight(weight_OI, bias_O)
        return self.product(self.encode(weight_OI), bias_O)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes that a product reads for each weight: its code, and its part of a group's scale and zero."""
        return self.bits / 8 + (0 if self.group is None else 4 / self.group)


GROUP_4 = 64

FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat("int8", 8, None, None, "int8", to_8_bits, int8_product),
    WeightFormat("w8a8", 8, None, 8, "w8a8", to_8_bits, w8a8_product),
    WeightFormat("int4", 4, GROUP_4, None, "int8", lambda weight_OI: to_4_bits(weight_OI, GROUP_4), int4_product),
)


def format_named(name: str) -> WeightFormat:
    """The format with this name.

    Raises:
        ConfigError: no format has this name.
    """
    row_format = next((row for row in FORMATS if row.name == name), None)
    if row_format is None:
        raise ConfigError(f"serve.quantize = '{name}' is no format; use one of {', '.join(r.name for r in FORMATS)}.")
    return row_format
