"""Paged attention: every row attends to the keys of its own text, in the text's pages.

One ``attend`` for each layer is passed to the trainer's own blocks. It writes the step's keys and values to their
slots, and reads each text's keys from its pages. In exact mode a row's bits are those of training, which are those of
``kernels.exact_attention`` where it is compiled, else of ``numerics.attention.invariant_attention``; in fast mode torch
attends.

No kernel of a GPU supports grouped heads together with a mask. There the queries of a key head are rows of one product,
so that keys are not copied for each query head, and the mask is made in pieces.

    n  texts side by side     N  query heads of this rank    L  slots read, in whole blocks
    C  new rows of each       K  key heads, each of G = N / K query heads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.engine.exact.position_bias import ExactBias
from superstep.kernels import exact_attention
from superstep.kernels.position_bias import Bias
from superstep.model.fused_attention import fused_attention
from superstep.numerics.attention.attention_sinks import join_sinks
from superstep.numerics.attention.invariant_attention import BLOCK, attend_rows, pad_keys
from superstep.numerics.sending import send
from superstep.numerics.soft_cap import soft_cap as cap_scores
from superstep.plan.model.attention_rule import PLAIN, AttentionRule
from superstep.serve.compute.flat_batch import RequestRows
from superstep.serve.compute.kv_cache import KvCache, SharedKeys, slots_of, together

FAST_BLOCK = 64
"""Key block of fast mode: texts with equally many blocks of this size are computed together."""

MASKED_ROWS = 256
"""Rows of a key head for which a GPU holds a mask at once."""


Mix = Callable[..., Tensor]
"""Attention of queries [n, C, N, H] to keys and values [n, L, K, H], and sinks [n, C, N] if there are: [n, C, N, H]."""


class AttentionInputs:
    """Inputs of attention that all layers of a step share.

    Args:
        parts: of the step.
        store: the KV cache.
        is_exact: whether bits must not depend on the batch.

    Attributes:
        slots: of each row's new key, [T].
        groups: rows that are computed together.
    """

    def __init__(self, parts: Sequence[RequestRows], store: KvCache, *, is_exact: bool) -> None:
        page_tokens, device = store.page_tokens, store.keys.device
        self.groups = together(parts, page_tokens, BLOCK if is_exact else FAST_BLOCK, device)
        written = [
            slot
            for part in parts
            for slot in slots_of(part, page_tokens, first=part.first, end=part.first + part.count)
        ]
        self.slots = send(torch.tensor(written), device)
        self._is_exact = is_exact
        self._in_kernel = is_exact and exact_attention.is_for(store.keys.shape[-1], device)
        self._in_pieces = store.keys.is_cuda and not is_exact
        self._mixes: dict[tuple[AttentionRule, bool], tuple[Mix, ...]] = {}

    def mixes(self, rule: AttentionRule, *, has_sinks: bool) -> tuple[Mix, ...]:
        """The attention function of each group, by a layer's rule; made once for all layers with this rule."""
        key = rule, has_sinks
        if key not in self._mixes:
            self._mixes[key] = tuple(self._mix(group, rule, has_sinks=has_sinks) for group in self.groups)
        return self._mixes[key]

    def _mix(self, group: SharedKeys, rule: AttentionRule, *, has_sinks: bool) -> Mix:
        starts_nC = torch.zeros_like(group.ends) if rule.window is None else (group.ends - rule.window).clamp_(min=0)
        if self._in_kernel and rule.soft_cap is None:
            return partial(_exact_in_kernel, starts_nC, group.ends)
        if rule.soft_cap is not None or (has_sinks and not self._is_exact):
            return partial(_exact if self._is_exact else _fast_scores, _hidden(group, starts_nC), rule.soft_cap)
        if self._in_pieces:
            return partial(_fast_in_pieces, starts_nC, group.ends)
        if self._is_exact:
            return partial(_exact, _hidden(group, starts_nC), None)
        return partial(_fast, _hidden(group, starts_nC))


def _hidden(group: SharedKeys, starts_nC: Tensor) -> Tensor:
    """The attention mask, True for hidden keys: [n, C, L]."""
    place_L = torch.arange(group.slots.shape[1], device=group.slots.device)
    return (place_L >= group.ends[..., None]) | (place_L < starts_nC[..., None])


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """The ``attend`` of one layer in one step."""

    store: KvCache
    layer: int
    step: AttentionInputs

    def __call__(
        self,
        q_1TNH: Tensor,
        k_1TKH: Tensor,
        v_1TKH: Tensor,
        rule: AttentionRule = PLAIN,
        bias: Bias | ExactBias | None = None,
        sinks_1TN: Tensor | None = None,
    ) -> Tensor:
        """The attention output: [1, T, N, H]."""
        self.store.write(self.layer, self.step.slots, k_1TKH[0], v_1TKH[0])
        out_TNH = torch.empty_like(q_1TNH[0])
        mixes: Sequence[Mix]
        if bias is None:
            mixes = self.step.mixes(rule, has_sinks=sinks_1TN is not None)
        else:
            added = bias if isinstance(bias, ExactBias) else ExactBias(bias)
            mixes = [partial(_attend_with_bias, group, rule, added) for group in self.step.groups]
        for group, mix in zip(self.step.groups, mixes, strict=True):
            keys, values = self.store.read(self.layer, group.slots)
            sinks = () if sinks_1TN is None else (sinks_1TN[0][group.rows],)
            out_TNH[group.rows] = mix(q_1TNH[0][group.rows], keys, values, *sinks).to(out_TNH.dtype)
        return out_TNH[None]


class PagedAttention:
    """Attention of a step: called with its parts, it returns the ``attend`` of each layer.

    Args:
        store: the KV cache.
        is_exact: whether bits must not depend on the batch.
    """

    def __init__(self, store: KvCache, *, is_exact: bool) -> None:
        self._store = store
        self._is_exact = is_exact

    def __call__(self, parts: Sequence[RequestRows]) -> Callable[[int], PagedAttend]:
        """The function from a layer's index to its ``attend``."""
        store = self._store
        step = AttentionInputs(parts, store, is_exact=self._is_exact)
        return lambda layer: PagedAttend(store, layer, step)


def _attend_with_bias(
    group: SharedKeys,
    rule: AttentionRule,
    bias: ExactBias,
    q_nCNH: Tensor,
    k_nLKH: Tensor,
    v_nLKH: Tensor,
    sinks_nCN: Tensor | None = None,
) -> Tensor:
    """Attention with a position bias, text by text, as exact mode has it in training."""
    kv_heads, heads = k_nLKH.shape[2], q_nCNH.shape[2] // k_nLKH.shape[2]
    place_L = torch.arange(k_nLKH.shape[1] + -k_nLKH.shape[1] % BLOCK, device=k_nLKH.device)
    out = torch.empty_like(q_nCNH)
    for text, ends_C in enumerate(group.ends):
        rows_KRH = _rows(q_nCNH[text : text + 1].float(), kv_heads)[0]
        keys, values = (pad_keys(x[text].float().transpose(0, 1)) for x in (k_nLKH, v_nLKH))
        behind_CL = ends_C[:, None] - 1 - place_L
        hidden_CL = behind_CL < 0 if rule.window is None else (behind_CL < 0) | (behind_CL >= rule.window)
        added = bias.compute(rows_KRH, behind_CL, kv_heads)
        sinks = None if sinks_nCN is None else _rows(sinks_nCN[text : text + 1, ..., None].float(), kv_heads)[0]
        mixed = attend_rows(rows_KRH, keys, values, hidden_CL.repeat(heads, 1), rule.soft_cap, added, sinks)
        out[text] = _unrows(mixed[None], heads)[0].to(out.dtype)
    return out


def _fast(hidden_nCL: Tensor, q_nCNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_nCNH, k_nLKH, v_nLKH))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden_nCL[:, None], enable_gqa=True)
    return mixed.transpose(1, 2)


def _fast_scores(
    hidden_nCL: Tensor,
    soft_cap: float | None,
    q_nCNH: Tensor,
    k_nLKH: Tensor,
    v_nLKH: Tensor,
    sinks_nCN: Tensor | None = None,
) -> Tensor:
    """From all scores at once, with a soft cap or sinks."""
    group = q_nCNH.shape[2] // k_nLKH.shape[2]
    rows, k_nKLH = _rows(q_nCNH, k_nLKH.shape[2]), k_nLKH.transpose(1, 2)
    scores = (rows @ k_nKLH.mT).float().mul_(q_nCNH.shape[-1] ** -0.5)
    if soft_cap is not None:
        scores = cap_scores(scores, soft_cap)
    scores.masked_fill_(hidden_nCL.repeat(1, group, 1)[:, None], float("-inf"))
    if sinks_nCN is not None:
        scores = torch.cat((scores, _rows(sinks_nCN[..., None], k_nLKH.shape[2]).float()), -1)
    weights = scores.softmax(-1)[..., : k_nLKH.shape[1]].to(v_nLKH.dtype)
    return _unrows(weights @ v_nLKH.transpose(1, 2), group)


def _fast_in_pieces(starts_nC: Tensor, ends_nC: Tensor, q_nCNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor) -> Tensor:
    group = q_nCNH.shape[2] // k_nLKH.shape[2]
    k_nKLH, v_nKLH = (x.transpose(1, 2) for x in (k_nLKH, v_nLKH))
    place_L = torch.arange(k_nLKH.shape[1], device=k_nLKH.device)
    out = torch.empty_like(q_nCNH)
    piece = max(1, MASKED_ROWS // group)
    for at in range(0, q_nCNH.shape[1], piece):
        here = slice(at, at + piece)
        is_visible = (place_L < ends_nC[:, here, None]) & (place_L >= starts_nC[:, here, None])
        rows = _rows(q_nCNH[:, here], k_nLKH.shape[2])
        mixed = fused_attention(rows, k_nKLH, v_nKLH, is_visible.repeat(1, group, 1)[:, None])
        out[:, here] = _unrows(mixed, group)
    return out


def _rows(x_nCNH: Tensor, kv_heads: int) -> Tensor:
    """Queries grouped by key head: [n, K, G·C, H]."""
    rows: Tensor = x_nCNH.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return rows


def _unrows(x_nKRH: Tensor, group: int) -> Tensor:
    """The inverse: [n, K, G·C, H] to [n, C, N, H]."""
    heads: Tensor = x_nKRH.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return heads


def _exact_in_kernel(
    starts_nC: Tensor,
    ends_nC: Tensor,
    q_nCNH: Tensor,
    k_nLKH: Tensor,
    v_nLKH: Tensor,
    sinks_nCN: Tensor | None = None,
) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q_nCNH, k_nLKH, v_nLKH))
    mixed, lse = exact_attention.attend(q, k, v, starts_BS=starts_nC, ends_BS=ends_nC)
    # Rounded to the stream's dtype before the sinks join, as in training.
    return join_sinks(mixed.transpose(1, 2).to(q_nCNH.dtype), lse, sinks_nCN)[0]


def _exact(
    hidden_nCL: Tensor,
    soft_cap: float | None,
    q_nCNH: Tensor,
    k_nLKH: Tensor,
    v_nLKH: Tensor,
    sinks_nCN: Tensor | None = None,
) -> Tensor:
    n, _, K, _ = k_nLKH.shape
    group = q_nCNH.shape[2] // K
    rows = _rows(q_nCNH.float(), K).flatten(0, 1)
    keys, values = (x.float().transpose(1, 2).flatten(0, 1) for x in (k_nLKH, v_nLKH))
    hidden = hidden_nCL.repeat(1, group, 1).repeat_interleave(K, 0)
    sinks = None if sinks_nCN is None else _rows(sinks_nCN[..., None].float(), K).flatten(0, 1)
    return _unrows(attend_rows(rows, keys, values, hidden, soft_cap, None, sinks).unflatten(0, (n, K)), group)
