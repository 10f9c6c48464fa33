"""Torch's fused attention, with heads in the formats of GPU kernels.

Where no kernel supports the heads, torch computes all scores at once, [S, T] of each head. The flash kernel supports
16-bit numbers in heads of up to 256, and no mask. The memory-efficient one supports fp32, wider heads and masks, but
each query head needs a key head of its own, of whole 16 bytes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    B  sequences    N  query heads           S  queries    H  width of one head
                    K  key and value heads   T  keys
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from superstep.plan.saved_activations import WIDEST_FLASH

ALIGNED_BYTES = 16


def fused_attention(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, is_visible: Tensor | None = None) -> Tensor:
    """The attention output, [B, N, S, H]: causal, or with the mask ``is_visible``, [S, T] or [B, 1, S, T]."""
    q, k, v = q_BNSH, k_BKTH, v_BKTH
    if not q.is_cuda:  # a CPU's kernels support groups, masks and any width
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=is_visible, is_causal=is_visible is None, enable_gqa=True
        )
    width = q.shape[-1]
    if is_visible is not None or not has_flash(q):
        k, v = expand_heads(k, q), expand_heads(v, q)
        q, k, v = (fill_up(x) for x in (q, k, v))
    out_BNSH = F.scaled_dot_product_attention(
        *(q, k, v),
        attn_mask=is_visible,
        is_causal=is_visible is None,
        scale=1 / math.sqrt(width),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out_BNSH if out_BNSH.shape[-1] == width else out_BNSH[..., :width]


def has_flash(x: Tensor) -> bool:
    """Whether a GPU's flash kernel supports heads of this dtype and width, possibly padded."""
    return x.is_cuda and x.element_size() == 2 and x.shape[-1] <= WIDEST_FLASH


def expand_heads(x_BKTH: Tensor, q_BNSH: Tensor) -> Tensor:
    """Each key or value head repeated for all of its query heads: [B, N, T, H]; the input itself for one query head."""
    group = q_BNSH.shape[1] // x_BKTH.shape[1]
    return x_BKTH if group == 1 else x_BKTH.repeat_interleave(group, dim=1)


def fill_up(x: Tensor) -> Tensor:
    """Pad each head with zeros to whole 16 bytes, if needed. Scores do not change."""
    missing = -x.shape[-1] % (ALIGNED_BYTES // x.element_size())
    return F.pad(x, (0, missing)) if missing else x
