"""Attention with bits that depend only on the query and the keys before it.

Keys lie in blocks of ``BLOCK``, counted from their document's start. A row's weights and values are summed over each
block, and the blocks from left to right. A block that a row does not see adds exact zeros, so other rows beside it do
not matter: a prompt in chunks, a single new token, a whole sequence in training have the same bits.
``numerics.invariant_matmul`` says why one product over at most ``BLOCK`` keys keeps them. On a CPU with a compiler
``kernels.exact_attention`` replaces it, with bits of its own.

    b  products side by side: sequences times key heads      P  keys, a multiple of BLOCK
    R  queries of a key head, at least ROWS                  H  width of one head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.kernels.invariant import product, row_sum
from superstep.numerics.invariant_matmul import PIECE, ROWS
from superstep.numerics.soft_cap import exact_tanh, soft_cap_slope_
from superstep.numerics.soft_cap import soft_cap as cap_scores

BLOCK = PIECE
"""Keys of a block: the inner dim of one product."""


def pad_keys(x_bPH: Tensor) -> Tensor:
    """The keys with zeros to fill the last block."""
    return F.pad(x_bPH, (0, 0, 0, -x_bPH.shape[1] % BLOCK))


def pad_rows(x_RX: Tensor) -> Tensor:
    """The rows with zeros up to ``ROWS``; the added rows do not count."""
    return F.pad(x_RX, (0, 0, 0, max(0, ROWS - x_RX.shape[-2])))


def attend_rows(
    rows_bRH: Tensor,
    keys_bPH: Tensor,
    values_bPH: Tensor,
    hidden: Tensor,
    soft_cap: float | None = None,
    added_bRP: Tensor | None = None,
    sinks_bR1: Tensor | None = None,
) -> Tensor:
    """The mixed values, [b, R, H], fp32.

    Args:
        rows_bRH: queries, fp32.
        keys_bPH: fp32, whole blocks.
        values_bPH: fp32; values hidden from all rows must be finite.
        hidden: which keys a row does not see: [R, P] or [b, R, P]. Each row sees at least one.
        soft_cap: a score s becomes soft_cap · tanh(s / soft_cap); None leaves it.
        added_bRP: added to the scores before the cap, fp32.
        sinks_bR1: of each row (``numerics.attention.attention_sinks``), fp32.
    """
    rows = rows_bRH.shape[1]
    rows_bRH, hidden = pad_rows(rows_bRH), pad_rows(hidden)
    added_bRP = None if added_bRP is None else pad_rows(added_bRP)
    weights_bRP, total_bR1, _, _ = _weights(rows_bRH, keys_bPH, hidden, soft_cap, added_bRP, sinks_bR1)
    out = product(weights_bRP[..., :BLOCK], values_bPH[:, :BLOCK])
    for at in range(BLOCK, keys_bPH.shape[1], BLOCK):
        out = product(weights_bRP[..., at : at + BLOCK], values_bPH[:, at : at + BLOCK], out)
    return out.div_(total_bR1)[:, :rows]


def probabilities(
    rows_bRH: Tensor,
    keys_bPH: Tensor,
    hidden: Tensor,
    soft_cap: float | None = None,
    added_bRP: Tensor | None = None,
    sinks_bR1: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The weights of ``attend_rows``, and the slope of the soft cap, if there is one: [b, R, P] each; and the sink's
    weight, [b, R, 1]. Each row's weights have sum one, with its sink's.
    """
    weights_bRP, total_bR1, slope_bRP, sink_bR1 = _weights(rows_bRH, keys_bPH, hidden, soft_cap, added_bRP, sinks_bR1)
    return weights_bRP.div_(total_bR1), slope_bRP, None if sink_bR1 is None else sink_bR1.div_(total_bR1)


def _weights(
    rows_bRH: Tensor,
    keys_bPH: Tensor,
    hidden: Tensor,
    soft_cap: float | None,
    added_bRP: Tensor | None,
    sinks_bR1: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """exp(score - largest score), its sum over each row with its sink, the slope of the soft cap, and the sink's part
    of the sum: [b, R, P], [b, R, 1], [b, R, P], [b, R, 1].
    """
    assert keys_bPH.shape[1] % BLOCK == 0, "keys come in whole blocks"
    scores_bRP = product(rows_bRH, keys_bPH.transpose(1, 2)).mul_(rows_bRH.shape[-1] ** -0.5)
    slope_bRP = None
    if added_bRP is not None:
        scores_bRP.add_(added_bRP)
    if soft_cap is not None:
        scores_bRP = cap_scores(scores_bRP, soft_cap, exact_tanh)
        slope_bRP = soft_cap_slope_(scores_bRP.clone(), soft_cap)
    scores_bRP.masked_fill_(hidden, float("-inf"))
    largest_bR1 = scores_bRP.amax(-1, keepdim=True)
    if sinks_bR1 is not None:
        sinks_bR1 = pad_rows(sinks_bR1)
        largest_bR1 = torch.maximum(largest_bR1, sinks_bR1)
    weights_bRP = scores_bRP.sub_(largest_bR1).exp_()
    first, *others = row_sum(weights_bRP.unflatten(-1, (-1, BLOCK))).unbind(-2)
    for part in others:
        first = first + part
    if sinks_bR1 is None:
        return weights_bRP, first, slope_bRP, None
    sink_bR1 = (sinks_bR1 - largest_bR1).exp_()
    return weights_bRP, first + sink_bR1, slope_bRP, sink_bR1
