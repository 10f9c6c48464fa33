"""The adapters of a step in the compiled decoder's format."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from superstep.model.decoder import Block
from superstep.model.feedforward import FeedForward
from superstep.serve.compute.flat_batch import RequestRows
from superstep.serve.compute.kernels.calls import AdapterArgs, LoraArgs, pointer
from superstep.serve.compute.lora import Adapters

NONE = AdapterArgs(None, 0, None)
NOBODYS = -1


class AdaptedRows:
    """Adapter factors of a dense model; their addresses are read again after an adapter is added or dropped.

    Args:
        adapters: of the rank.
        modules: the units of a dense model.
    """

    def __init__(self, adapters: Adapters, modules: Sequence[nn.Module]) -> None:
        self._adapters = adapters
        self._linears = [layer for block in modules[1:-1] for layer in linears_of(block)]
        self._changes = -1
        self._places: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self._of_row = torch.empty(0, dtype=torch.int64)

    def of(self, parts: Sequence[RequestRows]) -> AdapterArgs:
        """Adapters of a step's rows. The memory that it points to lives until the next call."""
        if not any(part.adapter for part in parts):
            return NONE
        if self._changes != self._adapters.changes:
            self._find()
        places = [self._places.get(part.adapter, NOBODYS) for part in parts]
        self._of_row = torch.tensor(places).repeat_interleave(torch.tensor([part.count for part in parts]))
        return AdapterArgs(ctypes.addressof(self._parts), len(self._places), pointer(self._of_row))

    def _find(self) -> None:
        """Read the addresses of each linear's factors: those of one linear side by side, the second transposed."""
        numbers = sorted(self._adapters.numbers)
        self._places = {number: place for place, number in enumerate(numbers)}
        self._kept = []
        runs = []
        for layer in self._linears:
            factors = self._adapters.factors(layer)
            for number in numbers:
                if number not in factors:
                    runs.append(LoraArgs(None, None, 0, 0.0))
                    continue
                held = factors[number]
                b_RO = held.b.t().contiguous()
                self._kept += [held.a, b_RO]
                runs.append(LoraArgs(pointer(held.a), pointer(b_RO), len(held.a), held.scale))
        self._parts = (LoraArgs * len(runs))(*runs)
        self._changes = self._adapters.changes


def linears_of(block: nn.Module) -> tuple[nn.Module, ...]:
    """The linears of a layer in the decoder's order."""
    assert isinstance(block, Block)
    assert isinstance(block.mlp, FeedForward)
    attention, mlp = block.self_attn, block.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
