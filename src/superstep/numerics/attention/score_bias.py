"""What a position bias adds to a block of scores, and its gradient. ``kernels.position_bias`` has the biases.

A block has R queries in a row and T keys in a row, and ``gap`` is the place of its first query minus that of its first
key, so query r is ``gap + r - t`` tokens behind key t. Its distances are laid out by query, the farthest first, and
moved into place by a view of the same memory: the skew of Music Transformer (Huang 2018, sec. 3.4.1).

    for R = 2, T = 3, gap = 1     2 1 0 .    ->    1 0 .     query 0 and keys 0, 1, 2
                                  2 1 0 .          2 1 0     query 1

    B  sequences    K  key heads    G  query heads of a key head    H  width of one head    D  the farthest distance
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_bias(scores_BKGRT: Tensor, q_BKGRH: Tensor, bias: Tensor, gap: int) -> None:
    """Add the bias to scores, in place; those of later keys are arbitrary.

    Args:
        bias: the tensor of a ``kernels.position_bias.Bias``: [N], [N, D + 1] or [N, H, D + 1].
    """
    kv_heads, (R, T) = scores_BKGRT.shape[1], scores_BKGRT.shape[-2:]
    bias_KG = bias.unflatten(0, (kv_heads, -1))
    far = _distances(R, T, gap, bias.device)
    if bias.dim() == 1:
        by_query = (bias_KG[..., None] * -far)[..., None, :].expand(*bias_KG.shape, R, R + T)
    elif bias.dim() == 2:
        by_query = bias_KG[..., far.clamp(0, bias.shape[-1] - 1)][..., None, :].expand(*bias_KG.shape[:2], R, R + T)
    else:
        by_content = (q_BKGRH.float() @ bias_KG).mul_(q_BKGRH.shape[-1] ** -0.5)
        by_query = by_content[..., far.clamp(0, bias.shape[-1] - 1)]
    scores_BKGRT.add_(_skew(by_query.contiguous(), T))


def add_bias_gradient(dscores_BKGRT: Tensor, q_BKGRH: Tensor, bias: Tensor, gap: int, dbias: Tensor) -> Tensor | None:
    """Add the bias's gradient to ``dbias``, and return what it adds to that of the queries; None for nothing.

    Args:
        dscores_BKGRT: the gradient of scores, fp32; that of hidden keys is 0.
    """
    if bias.dim() == 1:
        return None
    heads = dscores_BKGRT.shape[1:3]
    if bias.dim() == 2:
        by_query = by_distance(dscores_BKGRT.sum(0), gap, bias.shape[-1])
        dbias.unflatten(0, heads).add_(by_query.sum(-2))
        return None
    by_query = by_distance(dscores_BKGRT, gap, bias.shape[-1]).mul_(q_BKGRH.shape[-1] ** -0.5)
    dbias.unflatten(0, heads).add_((q_BKGRH.float().mT @ by_query).sum(0))
    dq_BKGRH: Tensor = by_query @ bias.unflatten(0, heads).mT
    return dq_BKGRH


def by_distance(x_RT: Tensor, gap: int, distances: int) -> Tensor:
    """The sum of each query's numbers over keys at one distance, [..., R, D + 1]; the last is of all that are farther.
    Those of later keys must be 0.
    """
    R, T = x_RT.shape[-2:]
    by_query = x_RT.new_zeros(*x_RT.shape[:-1], R + T)
    _skew(by_query, T).copy_(x_RT)
    nearest, farthest = gap - T, gap + R - 1
    by_query = by_query.flip(-1)
    out = x_RT.new_zeros(*x_RT.shape[:-1], distances)
    first, end = max(nearest, 0), min(farthest + 1, distances - 1)
    if first < end:
        out[..., first:end] = by_query[..., first - nearest : end - nearest]
    if farthest >= distances - 1:
        out[..., -1] = by_query[..., max(distances - 1 - nearest, 0) :].sum(-1)
    return out


def _distances(R: int, T: int, gap: int, device: torch.device) -> Tensor:
    """The distances of a row before the skew, with one that no key has: [R + T]."""
    return torch.arange(gap + R - 1, gap - T - 1, -1, device=device)


def _skew(x: Tensor, keys: int) -> Tensor:
    """A view of rows by distance, [..., R, R + T] contiguous, as rows by key, [..., R, T]."""
    rows, columns = x.shape[-2:]
    flat = x.flatten(-2)[..., rows - 1 : rows - 1 + rows * (columns - 1)]
    skewed: Tensor = flat.unflatten(-1, (rows, columns - 1))[..., :keys]
    return skewed
