"""KV cache in the layout of the compiled attention, and attention over it.

Slots come in groups of 16. Each pair of numbers of a key lies beside that of the other 15 keys; of values, each number
beside that of the next slot. So scores and outputs use the same loop as products.

    T  rows of a step         K  key heads of this rank
    N  query heads            H  width of one head
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import partial

import torch
from torch import Tensor

from superstep.kernels.position_bias import Bias
from superstep.model.decoder import Attend
from superstep.plan.model.attention_rule import PLAIN, AttentionRule
from superstep.serve.compute.flat_batch import RequestRows
from superstep.serve.compute.kernels.calls import KvCacheArgs, LayerKvArgs, Places, Queries, address, as_array, pointer

GROUP = 16
"""Slots with keys side by side."""

MOST_GROUP, MOST_WIDTH = 16, 256
"""Limits of the compiled attention: query heads of a key head, and the width of a head."""


class TiledKvCache:
    """Memory for ``pages`` pages of each layer.

    Args:
        layers: number of layers of the model.
        pages: of one layer.
        page_tokens: positions of a page.
        kv_heads: key heads of this rank.
        head_dim: width of a head.
    """

    def __init__(self, *, layers: int, pages: int, page_tokens: int, kv_heads: int, head_dim: int) -> None:
        self.page_tokens = page_tokens
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        size = pages * page_tokens * kv_heads * head_dim
        self.keys, self.values = (torch.zeros(layers, size, dtype=torch.bfloat16) for _ in range(2))
        self._layer_size = size

    @property
    def bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def all(self) -> KvCacheArgs:
        """The current addresses of all layers."""
        return KvCacheArgs(pointer(self.keys), pointer(self.values), self._layer_size)

    def layer(self, number: int) -> LayerKvArgs:
        """The current address of one layer."""
        return LayerKvArgs(pointer(self.keys[number]), pointer(self.values[number]), self.kv_heads, self.head_dim)


class PlacedRows:
    """The rows of a step, and the pages of their keys.

    Args:
        parts: of the step.
        page_tokens: positions of a page.
        window: number of tokens that a row attends to, itself included; None means all.
    """

    def __init__(self, parts: Sequence[RequestRows], page_tokens: int, window: int | None) -> None:
        numbers: list[int] = []
        pages: list[int] = []
        row = 0
        for part in parts:
            numbers += (row, part.first, part.count, len(pages))
            pages += part.pages
            row += part.count
        self._parts, self._pages = as_array(numbers, "q"), as_array(pages, "i")
        self.places = Places(address(self._parts), len(parts), address(self._pages), page_tokens, window or 0)


class TiledAttention:
    """Attention of a step: called with its parts, it returns the ``attend`` of each layer.

    Args:
        library: the compiled decoder.
        store: the KV cache.
    """

    def __init__(self, library: ctypes.CDLL, store: TiledKvCache) -> None:
        self._library = library
        self._store = store

    def __call__(self, parts: Sequence[RequestRows]) -> Callable[[int], Attend]:
        """The function from a layer's index to its ``attend``, which has neither soft cap nor position bias."""
        placed: dict[int | None, PlacedRows] = {}

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule = PLAIN, *others: Tensor | Bias | None
        ) -> Tensor:
            assert not rule.is_blockwise, "choose_backend has torch compute soft caps and biases"
            assert not others, "and sinks"
            if rule.window not in placed:
                placed[rule.window] = PlacedRows(parts, self._store.page_tokens, rule.window)
            return self._attend(placed[rule.window], layer, q, k, v)

        return lambda layer: partial(attend, layer)

    def _attend(self, placed: PlacedRows, layer: int, q_1TNH: Tensor, k_1TKH: Tensor, v_1TKH: Tensor) -> Tensor:
        q_TNH, k_TKH, v_TKH = (x[0].contiguous() for x in (q_1TNH, k_1TKH, v_1TKH))
        out_TNH = torch.empty_like(q_TNH)
        heads, width = q_TNH.shape[1:]
        self._library.superstep_attend(
            byref(Queries(pointer(q_TNH), heads * width, pointer(out_TNH), heads)),
            ctypes.c_void_p(pointer(k_TKH)),
            ctypes.c_void_p(pointer(v_TKH)),
            byref(self._store.layer(layer)),
            byref(placed.places),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return out_TNH[None]


def can_tile(*, heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype) -> bool:
    """Whether the compiled attention supports a model's heads and pages."""
    return (
        dtype == torch.bfloat16
        and heads % kv_heads == 0
        and heads // kv_heads <= MOST_GROUP
        and head_dim <= MOST_WIDTH
        and head_dim % GROUP == 0
        and page_tokens % GROUP == 0
    )
