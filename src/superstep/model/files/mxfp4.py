"""Experts' matrices in MXFP4 (OCP Microscaling 1.0, 2023), as gpt-oss's files have them: read as bf16, without loss.

NAME_blocks [E, O, G, 16] has 32 numbers of 4 bits in each group, the first in the lower half of a byte; NAME_scales
[E, O, G] the exponent of each group, plus 127. They make NAME, [E, I, O] with I = 32 · G.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GROUP = 32
"""Numbers with one scale."""
BIAS = 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A matrix of each expert, with the interface of a file and of a tensor in it: only a part that is asked for is
    read.
    """

    name: str
    blocks_file: Any
    scales_file: Any

    def get_slice(self, name: str) -> Mxfp4Tensor:
        return self

    def get_shape(self) -> list[int]:
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * GROUP, outputs]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        given = index if isinstance(index, tuple) else (index,)
        whole = zip((*given, slice(None), slice(None)), self.get_shape(), strict=False)
        experts, (first, end, _), outputs = (cut.indices(size) for cut, size in whole)
        groups = slice(first // GROUP, -(-end // GROUP))
        here = slice(*experts), slice(*outputs), groups
        values_EOI = unpack(self._blocks[here], self._scales[here])
        inputs = slice(first - groups.start * GROUP, end - groups.start * GROUP)
        return values_EOI[..., inputs].transpose(1, 2).contiguous()

    @property
    def _blocks(self) -> Any:  # noqa: ANN401
        return self.blocks_file.get_slice(f"{self.name}_blocks")

    @property
    def _scales(self) -> Any:  # noqa: ANN401
        return self.scales_file.get_slice(f"{self.name}_scales")


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers, [..., 32 · G] in bf16, of bytes [..., G, 16] and scales [..., G]."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.to(torch.int32) - BIAS
    return torch.ldexp(table[halves.int()], exponents.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def with_mxfp4(file_of: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a folder by name, with one for each pair of blocks and scales."""
    names = {name.removesuffix("_blocks") for name in file_of if name.endswith("_blocks")}
    pairs = {name for name in names if f"{name}_scales" in file_of}
    parts = {f"{name}_{part}" for name in pairs for part in ("blocks", "scales")}
    packed = {name: Mxfp4Tensor(name, file_of[f"{name}_blocks"], file_of[f"{name}_scales"]) for name in pairs}
    return {name: file for name, file in file_of.items() if name not in parts} | packed
