"""Attention of which a query's bits depend on the query and on the keys before it, and on nothing else.

Keys lie in blocks of ``BLOCK``, counted from where their document starts. A row's weights are summed over each block,
and the blocks from left to right; so are its values. A block that a row does not see adds exact zeros, so a row may be
computed beside rows that see more, or beside none: a prompt in chunks, a single new token, a whole sequence in training
have the same bits. ``numerics.invariant_matmul`` says why one product over at most ``BLOCK`` keys keeps them.

On a CPU with a compiler ``kernels.exact_attention`` takes its place, with bits of its own.

    b  products side by side: sequences times key heads      P  keys, a multiple of BLOCK
    R  queries of a key head, ROWS of them at least          H  width of one head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.numerics.invariant_matmul import PIECE, ROWS

BLOCK = PIECE
"""Keys of a block: the inner dim of one product."""


def pad_keys(x_bPH: Tensor) -> Tensor:
    """With as many zeros behind them as fill the last block."""
    return F.pad(x_bPH, (0, 0, 0, -x_bPH.shape[1] % BLOCK))


def pad_rows(x_RX: Tensor) -> Tensor:
    """With zeros below them until they are ``ROWS``: what they see or give counts for nothing."""
    return F.pad(x_RX, (0, 0, 0, max(0, ROWS - x_RX.shape[-2])))


def attend_rows(rows_bRH: Tensor, keys_bPH: Tensor, values_bPH: Tensor, hidden: Tensor) -> Tensor:
    """The mixed values, [b, R, H], fp32.

    Args:
        rows_bRH: queries, fp32, of any number.
        keys_bPH: fp32, whole blocks.
        values_bPH: fp32; what is hidden from all must be finite.
        hidden: which keys a row does not see: [R, P] or [b, R, P]. Each row sees one at least.
    """
    rows = rows_bRH.shape[1]
    rows_bRH, hidden = pad_rows(rows_bRH), pad_rows(hidden)
    weights_bRP, total_bR1 = _weights(rows_bRH, keys_bPH, hidden)
    out = torch.bmm(weights_bRP[..., :BLOCK], values_bPH[:, :BLOCK])
    for at in range(BLOCK, keys_bPH.shape[1], BLOCK):
        out.baddbmm_(weights_bRP[..., at : at + BLOCK], values_bPH[:, at : at + BLOCK])
    return out.div_(total_bR1)[:, :rows]


def probabilities(rows_bRH: Tensor, keys_bPH: Tensor, hidden: Tensor) -> Tensor:
    """The weights of ``attend_rows``, each row's summing to one: [b, R, P]."""
    weights_bRP, total_bR1 = _weights(rows_bRH, keys_bPH, hidden)
    return weights_bRP.div_(total_bR1)


def _weights(rows_bRH: Tensor, keys_bPH: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """exp(score - largest score), and its sum over each row: [b, R, P], [b, R, 1]."""
    assert keys_bPH.shape[1] % BLOCK == 0, "keys come in whole blocks"
    scores_bRP = torch.bmm(rows_bRH, keys_bPH.transpose(1, 2)).mul_(rows_bRH.shape[-1] ** -0.5)
    scores_bRP.masked_fill_(hidden, float("-inf"))
    weights_bRP = scores_bRP.sub_(scores_bRP.amax(-1, keepdim=True)).exp_()
    first, *others = weights_bRP.unflatten(-1, (-1, BLOCK)).sum(-1, keepdim=True).unbind(-2)
    for part in others:
        first = first + part
    return weights_bRP, first
