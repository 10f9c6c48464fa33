"""Offload of a trainer's memory between two steps, while the same processes serve.

Weights and moments go to the host's memory, or into a file. Gradients are dropped: a step begins without them. Storages
are emptied and filled in place, so that parameters and other views of them stay valid.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from superstep.engine.flat.buffers import UnitBuffers
from superstep.state.tensor_piece import bytes_of


class OffloadedBuffers:
    """The content of some buffers; their memory is freed.

    Args:
        buffers: of a rank, between two steps.
        folder: for an unnamed file; None keeps the content in the host's memory.
    """

    def __init__(self, buffers: Iterable[UnitBuffers], folder: Path | None) -> None:
        self._file = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by ``wake``
        self._held: list[tuple[Tensor, int, Tensor | None]] = []
        for b in buffers:
            for tensor in _distinct(b.full, *b.state):
                self._put(tensor)
            for tensor in _distinct(b.gradient, b.gradient_shard, b.reduced):
                size = tensor.untyped_storage().nbytes()
                if size:
                    self._held.append((tensor, size, None))
                    tensor.untyped_storage().resize_(0)

    def wake(self) -> None:
        """Allocate and restore the memory; gradients are zero. Call it once."""
        if self._file is not None:
            self._file.seek(0)
        for tensor, size, held in self._held:
            tensor.untyped_storage().resize_(size)
            into = _bytes(tensor)
            if held is None:
                into.zero_()
            elif self._file is None:
                into.copy_(held)
            else:
                read = torch.empty(size, dtype=torch.uint8)
                self._file.readinto(bytes_of(read))
                into.copy_(read)
        self._held.clear()
        if self._file is not None:
            self._file.close()

    def _put(self, tensor: Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        if not size:
            return
        held = _bytes(tensor).cpu()
        if self._file is not None:
            self._file.write(bytes_of(held))
            held = torch.empty(0, dtype=torch.uint8)
        elif tensor.device.type == "cpu":
            held = held.clone()
        self._held.append((tensor, size, held))
        tensor.untyped_storage().resize_(0)


def _distinct(*tensors: Tensor) -> list[Tensor]:
    """One tensor of each storage."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
