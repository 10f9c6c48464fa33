"""Matrices in FP8 with a scale for each block, as DeepSeek's and Kimi's files have them: read as fp32.

NAME [O, I] has numbers of 8 bits (e4m3), NAME_scale_inv [O / 128, I / 128] a factor in fp32 for each block of 128 by
128 (DeepSeek-V3, sec. 3.3.2). A number is the product of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
"""Rows, and columns, with one scale."""
SCALE = "_scale_inv"


@dataclass(frozen=True, slots=True)
class Fp8Tensor:
    """A matrix, with the interface of a file and of a tensor in it: only a part that is asked for is read."""

    name: str
    file: Any
    scales_file: Any

    def get_slice(self, name: str) -> Fp8Tensor:
        return self

    def get_shape(self) -> list[int]:
        return list(self.file.get_slice(self.name).get_shape())

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        given = index if isinstance(index, tuple) else (index,)
        whole = zip((*given, slice(None)), self.get_shape(), strict=False)
        (first, last, _), (left, right, _) = (cut.indices(size) for cut, size in whole)
        numbers: Tensor = self.file.get_slice(self.name)[first:last, left:right].float()
        blocks = slice(first // BLOCK, -(-last // BLOCK)), slice(left // BLOCK, -(-right // BLOCK))
        scales: Tensor = self.scales_file.get_slice(self.name + SCALE)[blocks].float()
        rows, columns = torch.arange(first, last) // BLOCK, torch.arange(left, right) // BLOCK
        return numbers * scales[rows - blocks[0].start][:, columns - blocks[1].start]


def with_fp8(file_of: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a folder by name, with one for each pair of numbers and scales."""
    names = {name for name in file_of if name + SCALE in file_of}
    packed = {name: Fp8Tensor(name, file_of[name], file_of[name + SCALE]) for name in names}
    return {name: file for name, file in file_of.items() if name.removesuffix(SCALE) not in names} | packed
