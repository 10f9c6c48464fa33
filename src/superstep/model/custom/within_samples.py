"""Operations on rows of ragged samples that keep the samples apart, for units of a user's model.

``numbers`` is the field ``NAME.sample`` of the batch: the number of each place's sample in its row, -1 in the padding.

    B  rows       S  places of a row                      D  width of a place
    N  heads      T  places of a row in a field of keys   H  width of one head
    K  key heads  M  samples of a row
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.model.fused_attention import fused_attention
from superstep.plan.model.attention_rule import PLAIN, AttentionRule


def attend_within(
    q_BSNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    rule: AttentionRule = PLAIN,
    *,
    numbers_BS: Tensor,
    key_numbers_BT: Tensor | None = None,
) -> Tensor:
    """Attention of each place to all places of its sample, [B, S, N, H], in both directions. Padding sees padding.

    With ``partial(attend_within, numbers_BS=...)`` a decoder's block sees both directions; only the plain rule is
    possible. Keys of another field have numbers of their own; there padding sees all, as it may have none to see.
    """
    assert rule == PLAIN, f"attention in both directions has no {rule}"
    q_BNSH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BSNH, k_BTKH, v_BTKH))
    if key_numbers_BT is None:
        is_visible_BST = numbers_BS[:, :, None] == numbers_BS[:, None, :]
    else:
        is_visible_BST = (numbers_BS[:, :, None] == key_numbers_BT[:, None, :]) | (numbers_BS < 0)[:, :, None]
    return fused_attention(q_BNSH, k_BKTH, v_BKTH, is_visible_BST[:, None]).transpose(1, 2)


def neighbours_within(x_BSD: Tensor, numbers_BS: Tensor, reach: int = 1) -> Tensor:
    """Each place with ``reach`` places before and behind it, in their order, [B, S, (2 · reach + 1) · D]; zero where
    these are of another sample.

    A linear layer of it is a convolution of that width, padded with zeros at both ends of each sample.
    """
    before, behind = [], []
    for far in range(1, reach + 1):
        is_own_BS1 = (numbers_BS[:, far:] == numbers_BS[:, :-far]).unsqueeze(-1)
        before.append(F.pad(x_BSD[:, :-far] * is_own_BS1, (0, 0, far, 0)))
        behind.append(F.pad(x_BSD[:, far:] * is_own_BS1, (0, 0, 0, far)))
    return torch.cat([*before[::-1], x_BSD, *behind], -1)


def positions_within(numbers_BS: Tensor) -> Tensor:
    """The position of each place in its sample, from 0 on: int64 [B, S]."""
    places_S = torch.arange(numbers_BS.shape[1], device=numbers_BS.device)
    starts_BS = places_S.expand_as(numbers_BS).clone()
    starts_BS[:, 1:] *= numbers_BS[:, 1:] != numbers_BS[:, :-1]
    return places_S - starts_BS.cummax(1).values


def mean_within(x_BSD: Tensor, numbers_BS: Tensor, samples: int) -> Tensor:
    """The mean over each sample's places: [B, samples, D]; zero for samples that a row lacks."""
    numbers_M = torch.arange(samples, device=numbers_BS.device)
    is_own_BMS = (numbers_M[:, None] == numbers_BS[:, None, :]).to(x_BSD.dtype)
    return (is_own_BMS @ x_BSD) / is_own_BMS.sum(-1, keepdim=True).clamp(min=1)
