"""Attention of rows that each see the keys of a text in pages: by an operation compiled here, or by torch's.

T  rows      N  query heads      K  key heads      H  width of a head      L  most keys of a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.serve.compute.kernels.build import Built

MOST_GROUP, MOST_WIDTH, WIDTHS = 16, 256, 32
"""What the operation takes: query heads of a key head, and widths of a head, of which it takes so much at a time."""


def can_attend(built: Built, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the operation takes a model's heads."""
    return (
        built.ops is not None
        and bool(built.ops.has_bf16())
        and dtype == torch.bfloat16
        and heads % kv_heads == 0
        and heads // kv_heads <= MOST_GROUP
        and head_dim <= MOST_WIDTH
        and head_dim % WIDTHS == 0
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where the keys lie that each row sees.

    Attributes:
        pages: of each row's text, in their order: [T, most pages], int32.
        first: the first position that a row sees: [T], int32.
        ends: the position behind the last one: [T], int32.
        page_tokens: positions of a page.
    """

    pages: Tensor
    first: Tensor
    ends: Tensor
    page_tokens: int


def paged_attention(built: Built, q_TNH: Tensor, keys: Tensor, values: Tensor, places: Places) -> Tensor:
    """The mixed values: [T, N, H].

    Args:
        built: ``attention``; ``can_attend`` holds.
        q_TNH: queries.
        keys: of one layer, [places, K, H].
        values: the same.
        places: of each row.
    """
    pages, first, ends = (x.contiguous() for x in (places.pages, places.first, places.ends))
    scale = q_TNH.shape[-1] ** -0.5
    out: Tensor = built.ops.paged_attention(
        q_TNH.contiguous(), keys, values, pages, first, ends, places.page_tokens, scale
    )
    return out


def gathered_attention(q_TNH: Tensor, keys: Tensor, values: Tensor, places: Places) -> Tensor:
    """The same by torch: keys and values are brought together, as many for each row as the longest text has."""
    first_T1, ends_T1 = places.first[:, None], places.ends[:, None]
    place_L = torch.arange(int(places.ends.max()), device=q_TNH.device)
    seen_TL = (place_L >= first_T1) & (place_L < ends_T1)
    slots_TL = places.pages[:, place_L // places.page_tokens].long() * places.page_tokens + place_L % places.page_tokens
    # What is not seen is the first seen place again: a share of zero times a number that is none would be none.
    slots_TL = torch.where(seen_TL, slots_TL, slots_TL.gather(1, first_T1.long()))
    k_TKLH, v_TKLH = (x[slots_TL].transpose(1, 2) for x in (keys, values))
    out_TN1H = F.scaled_dot_product_attention(
        q_TNH[:, :, None], k_TKLH, v_TKLH, attn_mask=seen_TL[:, None, None], enable_gqa=True
    )
    return out_TN1H[:, :, 0]
