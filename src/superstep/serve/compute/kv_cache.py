"""The KV cache: keys and values of every layer, in pages.

T  rows of a step         K  key heads of this rank
L  positions of a text    H  width of one head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.numerics.sending import send
from superstep.serve.compute.flat_batch import RequestRows


class KvCache:
    """Memory for ``pages`` pages of each layer.

    Args:
        layers: number of layers of the model.
        pages: of one layer.
        page_tokens: positions of a page.
        kv_heads: key heads of this rank.
        head_dim: width of a head.
        dtype: of keys and values.
        device: of the memory.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_tokens = page_tokens
        shape = (layers, pages * page_tokens, kv_heads, head_dim)
        # Zeros, not uninitialised memory: zero times NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Write the keys and values of new positions into their slots."""
        self.keys[layer].index_copy_(0, slots_T, k_TKH)
        self.values[layer].index_copy_(0, slots_T, v_TKH)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of some slots, each [*slots.shape, K, H]."""
        flat = slots.flatten()
        return tuple(x[layer].index_select(0, flat).unflatten(0, slots.shape) for x in (self.keys, self.values))


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Requests that are computed in one product: equal numbers of rows, and of key blocks.

    Attributes:
        rows: the rows of each, [n, C].
        ends: the number of positions that each row attends to, [n, C]: those up to its own.
        slots: of the keys, [n, L]; the first slot is repeated after a text's end.
    """

    rows: Tensor
    ends: Tensor
    slots: Tensor


def slots_of(part: RequestRows, page_tokens: int, *, first: int, end: int) -> list[int]:
    """Slots of positions ``first`` to ``end`` of a part in a layer's cache."""
    return [part.pages[place // page_tokens] * page_tokens + place % page_tokens for place in range(first, end)]


FEW = 16
"""Requests with at most this many rows (new tokens and draft tokens) are computed together."""


def together(parts: Sequence[RequestRows], page_tokens: int, block: int, device: torch.device) -> list[SharedKeys]:
    """The parts of a step; those with equally few rows and equally many key blocks are grouped."""
    groups: dict[tuple[int, ...], list[tuple[int, RequestRows]]] = {}
    at = 0
    for number, part in enumerate(parts):
        kind = (part.count, -(-(part.first + part.count) // block))
        groups.setdefault(kind if part.count <= FEW else (*kind, number), []).append((at, part))
        at += part.count
    return [_gather_pages(members, page_tokens, kind[1] * block, device) for kind, members in groups.items()]


def _gather_pages(
    members: Sequence[tuple[int, RequestRows]], page_tokens: int, length: int, device: torch.device
) -> SharedKeys:
    rows, ends, slots = [], [], []
    for at, part in members:
        end = part.first + part.count
        held = slots_of(part, page_tokens, first=0, end=end)
        rows.append(list(range(at, at + part.count)))
        ends.append(list(range(part.first + 1, end + 1)))
        slots.append(held + held[:1] * (length - end))
    return SharedKeys(*(send(torch.tensor(x), device) for x in (rows, ends, slots)))
