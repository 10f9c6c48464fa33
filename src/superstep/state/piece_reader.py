"""Pieces filled from a checkpoint of any layout, and of any format of moments.

Moments in 8 bits are two tensors of a checkpoint: codes, and the scales of their blocks. Where the checkpoint has the
one format and the run the other, numbers are decoded, or encoded anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superstep.kernels.blocks.dynamic_map import DynamicMap, decode, dynamic_map, encode
from superstep.numerics.narrow.narrow_update import is_signed
from superstep.state.manifest import Manifest, StoredTensor
from superstep.state.tensor_file import ELEMENT_BYTES, StoredDtype, entry
from superstep.state.tensor_piece import SCALE, SCALED, TensorPiece, runs

_NUMBERS: Mapping[StoredDtype, type[np.generic]] = {"F32": np.float32, "U8": np.uint8}


def find_foreign(manifest: Manifest, pieces: Sequence[TensorPiece], *, converts: bool) -> list[str]:
    """Tensors that this rank needs and the checkpoint does not have.

    Args:
        converts: whether moments may have another format there.
    """
    stored, problems = manifest.tensors, []
    for piece in pieces:
        name = entry(piece.kind, piece.name)
        if name in stored and stored[name].shape == piece.shape:
            if converts or stored[name].dtype == _dtype_of(piece):
                continue
            has = f"has it as {stored[name].dtype}, not {_dtype_of(piece)}"
        elif converts and piece.name.endswith(SCALE) and name.removesuffix(SCALE) in stored:
            continue
        else:
            has = f"has it as {list(stored[name].shape)}" if name in stored else "does not have it"
        problems.append(f"the run needs {name} {list(piece.shape)}, and the checkpoint {has}")
    return problems


def fill_pieces(folder: Path, manifest: Manifest, pieces: Sequence[TensorPiece]) -> None:
    """Fill pieces from a verified checkpoint that has all of them."""
    with ExitStack() as stack:
        reader = _Reader(folder, manifest.tensors, stack)
        filled = [piece for piece in pieces if piece.values.numel()]
        for number, piece in enumerate(filled):
            name = entry(piece.kind, piece.name)
            if name not in manifest.tensors:
                continue  # scales of numbers that are encoded
            numbers = reader.read(name, piece)
            if numbers.dtype == torch.uint8 and piece.values.dtype != torch.uint8:
                numbers = reader.decode(name, piece, numbers)
            if numbers.dtype != torch.uint8 and piece.values.dtype == torch.uint8:
                codes, scales = torch.empty(len(numbers), dtype=torch.uint8), torch.empty(len(numbers) // SCALED)
                encode(numbers, codes, scales, _map_of(piece))
                piece.values.copy_(codes)
                filled[number + 1].values.copy_(scales)  # they follow their codes
            else:
                piece.values.copy_(numbers)


class _Reader:
    """Reads runs of a checkpoint's tensors."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor], stack: ExitStack) -> None:
        self._folder = folder
        self._tensors = tensors
        self._stack = stack
        self._handles: dict[str, int] = {}

    def read(self, name: str, piece: TensorPiece) -> Tensor:
        """The elements of a piece as they are stored."""
        stored = self._tensors[name]
        numbers: NDArray[np.generic] = np.empty(piece.values.numel(), dtype=_NUMBERS[stored.dtype])
        for run in runs(piece.shape, piece.index, piece.low, len(numbers)):
            self._read(stored, run.offset, numbers[run.at : run.at + run.count])
        return torch.from_numpy(numbers)

    def decode(self, name: str, piece: TensorPiece, codes: Tensor) -> Tensor:
        """The numbers of codes, which may begin and end amid a block."""
        stored, of = self._tensors[name + SCALE], _map_of(piece)
        numbers = torch.empty(len(codes))
        for run in runs(piece.shape, piece.index, piece.low, len(codes)):
            first, last = run.offset // SCALED, -(-(run.offset + run.count) // SCALED)
            scales = np.empty(last - first, dtype="<f4")
            self._read(stored, first, scales)
            whole = torch.full((len(scales) * SCALED,), of.zero, dtype=torch.uint8)
            here = slice(run.offset - first * SCALED, run.offset - first * SCALED + run.count)
            whole[here] = codes[run.at : run.at + run.count]
            numbers[run.at : run.at + run.count] = decode(whole, torch.from_numpy(scales), of)[here]
        return numbers

    def _read(self, stored: StoredTensor, first: int, into: NDArray[np.generic]) -> None:
        """Read elements from the number ``first`` on."""
        if stored.file not in self._handles:
            self._handles[stored.file] = os.open(self._folder / stored.file, os.O_RDONLY)
            self._stack.callback(os.close, self._handles[stored.file])
        data, offset = into.data.cast("B"), stored.offset + ELEMENT_BYTES[stored.dtype] * first
        while data:
            got = os.preadv(self._handles[stored.file], [data], offset)
            if not got:
                raise OSError(f"a file ends at byte {offset}")
            data, offset = data[got:], offset + got


def _map_of(piece: TensorPiece) -> DynamicMap:
    return dynamic_map(is_signed=is_signed(piece.kind))


def _dtype_of(piece: TensorPiece) -> str:
    return "U8" if piece.values.dtype == torch.uint8 else "F32"
