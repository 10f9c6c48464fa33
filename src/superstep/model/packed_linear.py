"""Linears whose frozen weight lies in blocks of few bits, put in the place of plain ones from outside.

A unit keeps its code. The module has the blocks and the scales of the whole matrix as parameters of bytes; the specs of
both tell how the values of the matrix make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.kernels.packed.pack import BlockPlace, whole_place
from superstep.kernels.packed.unpack import PackedWeight, Weight, multiply_packed
from superstep.model.unit import PackedPart, ParamSpec
from superstep.plan.block_weights import BLOCK, BLOCK_BYTES, BlockFormat, block_sizes

SCALES = "scales"
"""The name of a linear's scales beside its weight."""


class PackedLinear(nn.Linear):
    """A linear with a frozen weight in blocks.

    Args:
        linear: that it replaces.
        block_format: of the blocks.

    Attributes:
        place: of a rank's part in the whole matrix; None where it has the whole.
    """

    def __init__(self, linear: nn.Linear, block_format: BlockFormat) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        sizes, device = block_sizes(block_format, self.out_features, self.in_features), linear.weight.device
        self.weight = _bytes((self.out_features, sizes.row), device)
        self.scales = _bytes((sizes.scales,), device)
        self.register_parameter("bias", linear.bias)
        self.block_format = block_format
        self.place: BlockPlace | None = None

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, weight_of(self), self.bias)


def _bytes(shape: Sequence[int], device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(tuple(shape), dtype=torch.uint8, device=device), requires_grad=False)


def weight_of(layer: nn.Linear) -> Weight:
    """The weight of a linear, packed or not, as its product reads it."""
    if layer.weight.dtype != torch.uint8:
        return layer.weight
    packed: Any = layer
    rows, width = layer.weight.shape
    place = packed.place or whole_place(rows, width // BLOCK_BYTES[packed.block_format] * BLOCK)
    return PackedWeight(layer.weight, packed.scales, place, packed.block_format)


def multiply(x: Tensor, weight: Weight, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias."""
    if isinstance(weight, PackedWeight):
        return multiply_packed(x, weight, bias_O)
    return F.linear(x, weight, bias_O)


def pack_linears(module: nn.Module, paths: Sequence[str], block_format: BlockFormat) -> None:
    """Put packed linears in the place of a module's plain ones."""
    for path in paths:
        around, _, leaf = path.rpartition(".")
        linear = module.get_submodule(path)
        assert type(linear) is nn.Linear, "the outline lists plain linears alone"
        setattr(module.get_submodule(around), leaf, PackedLinear(linear, block_format))


def pack_specs(
    params: Mapping[str, ParamSpec], shapes: Mapping[str, tuple[int, ...]], block_format: BlockFormat
) -> dict[str, ParamSpec]:
    """Specs of a unit's parameters with those of packed linears.

    Args:
        params: frozen, by local name.
        shapes: of the matrices to pack, by the path of their linear.
        block_format: of the blocks.
    """
    packed = dict(params)
    for path, shape in shapes.items():
        outputs, inputs = shape
        spec = params[f"{path}.weight"]
        scales = replace(spec, name=f"{spec.name}:{SCALES}", axes=(None,), sections=())
        packed[f"{path}.weight"] = replace(
            spec, packed=PackedPart(spec.name, (outputs, inputs), block_format, is_scales=False)
        )
        packed[f"{path}.{SCALES}"] = replace(
            scales, packed=PackedPart(spec.name, (outputs, inputs), block_format, is_scales=True)
        )
    return packed


@dataclass(frozen=True, slots=True)
class BuildPacked:
    """Builds a unit's module with packed linears."""

    build: Callable[[], nn.Module]
    paths: tuple[str, ...]
    block_format: BlockFormat

    def __call__(self) -> nn.Module:
        module = self.build()
        pack_linears(module, self.paths, self.block_format)
        return module
