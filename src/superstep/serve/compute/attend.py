"""Attention of a step: every row sees the keys of its own text, wherever their pages are.

One ``attend`` for each layer is passed to the trainer's own blocks. It writes the step's keys and values to their
places, and reads each text's from its pages. In exact mode a row's bits are those of training, which are those of
``kernels.exact_attention`` where it is compiled, else of ``numerics.invariant_attention``; in fast mode torch attends.

    n  texts side by side     N  query heads of this rank    L  places read, in whole blocks
    C  new rows of each       K  key heads, each of G = N / K query heads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.kernels import exact_attention
from superstep.numerics.invariant_attention import BLOCK, attend_rows
from superstep.serve.compute.keys import KeyStore, Together, slots_of, together
from superstep.serve.compute.rows import Part

FAST_BLOCK = 64
"""In fast mode texts are read together whose lengths are of the same so many keys."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What all layers of a step have in common.

    Attributes:
        slots: where each row's key goes, [T].
        groups: rows that are computed together.
        seen: for each group, the first key that each row sees, and one past the last: [n, C] each.
        hidden: which keys they do not see: [n, C, L].
        is_exact: whether bits must not depend on what is computed together.
    """

    slots: Tensor
    groups: tuple[Together, ...]
    seen: tuple[tuple[Tensor, Tensor], ...]
    hidden: tuple[Tensor, ...]
    is_exact: bool


def reading(
    parts: Sequence[Part],
    page_tokens: int,
    device: torch.device,
    *,
    window: int | None,
    is_exact: bool,
) -> Reading:
    """The places of a step's rows.

    Args:
        parts: of the step.
        page_tokens: positions of a page.
        device: where keys lie.
        window: tokens that a row sees back to, itself among them; None means all.
        is_exact: whether bits must not depend on what is computed together.
    """
    block = BLOCK if is_exact else FAST_BLOCK
    groups = together(parts, page_tokens, block, device)
    written = [
        slot for part in parts for slot in slots_of(part, page_tokens, first=part.first, end=part.first + part.count)
    ]
    seen = tuple((_starts(group.ends, window), group.ends) for group in groups)
    return Reading(
        slots=torch.tensor(written, device=device),
        groups=tuple(groups),
        seen=seen,
        hidden=tuple(_hidden(group, *its) for group, its in zip(groups, seen, strict=True)),
        is_exact=is_exact,
    )


def _starts(ends_nC: Tensor, window: int | None) -> Tensor:
    return torch.zeros_like(ends_nC) if window is None else (ends_nC - window).clamp_(min=0)


def _hidden(group: Together, starts_nC: Tensor, ends_nC: Tensor) -> Tensor:
    place_L = torch.arange(group.slots.shape[1], device=group.slots.device)
    return (place_L >= ends_nC[..., None]) | (place_L < starts_nC[..., None])


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """The ``attend`` of one layer in one step."""

    store: KeyStore
    layer: int
    step: Reading

    def __call__(self, q_1TNH: Tensor, k_1TKH: Tensor, v_1TKH: Tensor) -> Tensor:
        """The mixed values: [1, T, N, H]."""
        self.store.write(self.layer, self.step.slots, k_1TKH[0], v_1TKH[0])
        out_TNH = torch.empty_like(q_1TNH[0])
        for group, seen, hidden in zip(self.step.groups, self.step.seen, self.step.hidden, strict=True):
            q, (keys, values) = q_1TNH[0][group.rows], self.store.read(self.layer, group.slots)
            if not self.step.is_exact:
                mixed = _fast(q, keys, values, hidden)
            elif exact_attention.takes(q):
                mixed = _exact_in_kernel(q, keys, values, seen)
            else:
                mixed = _exact(q, keys, values, hidden)
            out_TNH[group.rows] = mixed.to(out_TNH.dtype)
        return out_TNH[None]


class PagedAttention:
    """What attends in a step: called with its parts, gives the ``attend`` of each layer.

    Args:
        store: of keys.
        device: where they lie.
        window: tokens that a row sees back to, itself among them; None means all.
        is_exact: whether bits must not depend on what is computed together.
    """

    def __init__(self, store: KeyStore, device: torch.device, *, window: int | None, is_exact: bool) -> None:
        self._store = store
        self._device = device
        self._window = window
        self._is_exact = is_exact

    def __call__(self, parts: Sequence[Part]) -> Callable[[int], PagedAttend]:
        """The ``attend`` of a layer, by its number."""
        store = self._store
        step = reading(parts, store.page_tokens, self._device, window=self._window, is_exact=self._is_exact)
        return lambda layer: PagedAttend(store, layer, step)


def _fast(q_nCNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, hidden_nCL: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_nCNH, k_nLKH, v_nLKH))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden_nCL[:, None], enable_gqa=True)
    return mixed.transpose(1, 2)


def _exact_in_kernel(q_nCNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q_nCNH, k_nLKH, v_nLKH))
    mixed, _ = exact_attention.attend(q, k, v, starts_BS=seen[0], ends_BS=seen[1])
    return mixed.transpose(1, 2)


def _exact(q_nCNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, hidden_nCL: Tensor) -> Tensor:
    n, C, N, H = q_nCNH.shape
    K = k_nLKH.shape[2]
    rows = q_nCNH.float().view(n, C, K, N // K, H).permute(0, 2, 3, 1, 4).reshape(n * K, -1, H)
    keys, values = (x.float().transpose(1, 2).reshape(n * K, -1, H) for x in (k_nLKH, v_nLKH))
    hidden = hidden_nCL.repeat(1, N // K, 1).repeat_interleave(K, 0)
    mixed = attend_rows(rows, keys, values, hidden)
    return mixed.view(n, K, N // K, C, H).permute(0, 3, 1, 2, 4).reshape(n, C, N, H)
