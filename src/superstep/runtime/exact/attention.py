"""Causal attention whose bits do not depend on who computes which part.

The sequence is cut into chunks, the same on every layout. A chunk's queries meet all keys up to its end in one product,
so that every sum over keys has one length and one order, whichever rank holds the chunk and however many heads. A key
serves the queries of several chunks: their parts of its gradient are put on a fixed grid and added as integers.

With a document mask the products stay as they are, and scores across documents are struck out with those of later keys.

    B  sequences      N  query heads              P  the keys that a chunk's queries may see
    C  a chunk        K  key and value heads      G  query heads of one key head, N / K
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from superstep.numerics.fixed_point import ACTIVATION, Grid


class Exchange(Protocol):
    """How keys and values of a sequence meet that lies on several ranks."""

    def gather(self, x_BsKH: Tensor) -> Tensor:
        """Those of the whole sequence, in its order."""

    def scatter_sum(self, x_BSKH: Tensor) -> Tensor:
        """The way back: this rank's own, summed over ranks."""


class Alone:
    """The whole sequence lies here."""

    def gather(self, x_BsKH: Tensor) -> Tensor:
        """The same."""
        return x_BsKH

    def scatter_sum(self, x_BSKH: Tensor) -> Tensor:
        """The same."""
        return x_BSKH


@dataclass(frozen=True, slots=True)
class ExactAttend:
    """Causal attention over chunks of a sequence.

    Attributes:
        chunks: numbers of the chunks that this rank's queries are of, in the order in which they lie.
        exchange: how it gets the keys and values of the others.
        grid: of the gradients of keys and values, to which every chunk of a sequence may add.
        starts: with a document mask: for each position of the whole sequences, where its document starts: [B, S].
    """

    chunks: Sequence[int]
    exchange: Exchange
    grid: Grid = ACTIVATION
    starts: Tensor | None = None

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """The mixed values: [B, S, N, H]."""
        out: Tensor = _Attend.apply(q_BSNH, k_BSKH, v_BSKH, self)  # type: ignore[no-untyped-call]
        return out

    def hidden(self, chunk: int, length: int, device: torch.device) -> Tensor:
        """Which keys a query of a chunk does not see: [B, C, P], or without documents, of the last keys: [1, C, C]."""
        later = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)[None]
        if self.starts is None:
            return later
        first = chunk * length
        earlier = torch.arange(first + length, device=device) < self.starts[:, first : first + length, None]
        earlier[..., first:] |= later
        return earlier


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: ExactAttend) -> Tensor:  # noqa: ANN401
        ctx.dtype, ctx.how = q.dtype, how
        keys, values = (_by_head(how.exchange.gather(x.contiguous()).float()) for x in (k, v))
        ctx.save_for_backward(q, keys, values)
        kv_heads, length = k.shape[2], q.shape[1] // len(how.chunks)
        out = torch.empty_like(q)
        for at, chunk in enumerate(how.chunks):
            here, seen = slice(at * length, (at + 1) * length), (chunk + 1) * length
            p = _probabilities(_rows(q[:, here], kv_heads), keys[:, :seen], how.hidden(chunk, length, q.device))
            out[:, here] = _unrows(torch.bmm(p, values[:, :seen]), q[:, here]).to(q.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401
        q, keys, values = ctx.saved_tensors
        how: ExactAttend = ctx.how
        kv_heads, length = keys.shape[0] // q.shape[0], q.shape[1] // len(how.chunks)
        dq = torch.empty_like(q)
        dkeys, dvalues = (torch.zeros(x.shape, dtype=torch.int64, device=x.device) for x in (keys, values))
        for at, chunk in enumerate(how.chunks):
            here, seen = slice(at * length, (at + 1) * length), (chunk + 1) * length
            rows, drows = _rows(q[:, here], kv_heads), _rows(grad[:, here], kv_heads)
            p = _probabilities(rows, keys[:, :seen], how.hidden(chunk, length, q.device))
            dp = torch.bmm(drows, values[:, :seen].transpose(1, 2))
            dvalues[:, :seen] += how.grid.put_(torch.bmm(p.transpose(1, 2), drows))
            ds = (dp - (p * dp).sum(-1, keepdim=True)).mul_(p).mul_(q.shape[-1] ** -0.5)
            dq[:, here] = _unrows(torch.bmm(ds, keys[:, :seen]), q[:, here]).to(q.dtype)
            dkeys[:, :seen] += how.grid.put_(torch.bmm(ds.transpose(1, 2), rows))
        dk, dv = (
            how.grid.take(how.exchange.scatter_sum(_by_token(x, q.shape[0]))).to(ctx.dtype) for x in (dkeys, dvalues)
        )
        return dq, dk, dv, None


def _by_head(x_BSKH: Tensor) -> Tensor:
    """[B·K, S, H]."""
    B, S, K, H = x_BSKH.shape
    return x_BSKH.transpose(1, 2).reshape(B * K, S, H)


def _by_token(x: Tensor, sequences: int) -> Tensor:
    """Back from [B·K, S, H] to [B, S, K, H]."""
    parted: Tensor = x.unflatten(0, (sequences, -1))
    return parted.transpose(1, 2).contiguous()


def _rows(x_BCNH: Tensor, kv_heads: int) -> Tensor:
    """The queries of a key head in a row: [B·K, G·C, H], fp32."""
    B, C, N, H = x_BCNH.shape
    return x_BCNH.float().view(B, C, kv_heads, N // kv_heads, H).permute(0, 2, 3, 1, 4).reshape(B * kv_heads, -1, H)


def _unrows(rows: Tensor, like_BCNH: Tensor) -> Tensor:
    """Back from [B·K, G·C, H] to [B, C, N, H]."""
    B, C, N, H = like_BCNH.shape
    kv_heads = rows.shape[0] // B
    return rows.view(B, kv_heads, N // kv_heads, C, H).permute(0, 3, 1, 2, 4).reshape(B, C, N, H)


def _probabilities(rows: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """[B·K, G·C, P]: the softmax of the scores but for those that are hidden, of the last keys."""
    scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(rows.shape[-1] ** -0.5)
    sequences, length, last = hidden.shape
    seen = scores[..., -last:].unflatten(0, (sequences, -1)).unflatten(2, (-1, length))
    seen.masked_fill_(hidden[:, None, None], float("-inf"))
    p: Tensor = torch.softmax(scores, dim=-1)
    return p
