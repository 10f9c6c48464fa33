"""Causal attention with bits that do not depend on the layout.

A query's result is computed in blocks of keys from its document's start, independent of the rank and the batch: by
``kernels.exact_attention`` on a CPU, and otherwise by ``numerics.attention.invariant_attention``. For gradients the
sequence is cut into chunks, the same on every layout. A key serves the queries of several chunks: their parts of its
gradient are rounded to a fixed grid and added as integers.

    B  sequences      N  query heads              P  the keys that a chunk's queries may see
    C  a chunk        K  key and value heads      G  query heads of one key head, N / K
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from superstep.engine.exact.position_bias import ExactBias
from superstep.kernels import exact_attention as kernel
from superstep.kernels.invariant import product, row_sum
from superstep.kernels.position_bias import Bias
from superstep.numerics.attention.attention_sinks import join_sinks, sinks_gradient
from superstep.numerics.attention.invariant_attention import BLOCK, attend_rows, pad_keys, pad_rows, probabilities
from superstep.numerics.fixed_point import ACTIVATION, Grid
from superstep.plan.model.attention_rule import PLAIN, AttentionRule


class KeyExchange(Protocol):
    """Exchange of keys and values of a sequence that is split over ranks."""

    def gather(self, x_BsKH: Tensor) -> Tensor:
        """The whole sequence, in order."""

    def scatter_sum(self, x_BSKH: Tensor) -> Tensor:
        """The inverse: the sum over ranks of this rank's own tokens."""


class WholeSequence:
    """The exchange of a whole sequence."""

    def gather(self, x_BsKH: Tensor) -> Tensor:
        return x_BsKH

    def scatter_sum(self, x_BSKH: Tensor) -> Tensor:
        return x_BSKH


@dataclass(frozen=True, slots=True)
class ExactAttend:
    """Causal attention over chunks of a sequence.

    Attributes:
        chunks: numbers of the chunks of this rank's queries, in memory order.
        exchange: for keys and values of other ranks.
        grid: of the gradients of keys and values, to which every chunk of a sequence may add.
        starts: with a document mask: for each position of the whole sequences, the start of its document: [B, S].
    """

    chunks: Sequence[int]
    exchange: KeyExchange
    grid: Grid = ACTIVATION
    starts: Tensor | None = None

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        rule: AttentionRule = PLAIN,
        bias: Bias | ExactBias | None = None,
        sinks_BSN: Tensor | None = None,
    ) -> Tensor:
        """The attention output: [B, S, N, H]."""
        if bias is not None and not isinstance(bias, ExactBias):
            bias = ExactBias(bias)
        tensors = q_BSNH, k_BSKH, v_BSKH, sinks_BSN
        out: Tensor = _Attend.apply(*tensors, self, rule, bias)  # type: ignore[no-untyped-call]
        return out

    def parts(self, chunk: int, length: int, sequences: int) -> Iterator[QueryPart]:
        """Parts of a chunk with the same first key: all sequences, or each document."""
        first, end = chunk * length, (chunk + 1) * length
        if self.starts is None:
            yield QueryPart(slice(0, sequences), first, end, 0)
            return
        for row, starts in enumerate(self.starts[:, first:end].tolist()):
            for start, group in groupby(range(length), key=starts.__getitem__):
                places = list(group)
                yield QueryPart(slice(row, row + 1), first + places[0], first + places[-1] + 1, start)


@dataclass(frozen=True, slots=True)
class QueryPart:
    """Queries with the same keys, apart from later ones.

    Attributes:
        sequences: of the queries.
        first: position of the first query.
        end: one past the last one's.
        start: position of the first key.
    """

    sequences: slice
    first: int
    end: int
    start: int

    def behind(self, device: torch.device) -> Tensor:
        """How many tokens each key is before each query, of whole blocks of keys: [queries, P]."""
        keys = self.end - self.start + -(self.end - self.start) % BLOCK
        place = torch.arange(self.first - self.start, self.end - self.start, device=device)[:, None]
        return place - torch.arange(keys, device=device)

    def hidden(self, window: int | None, device: torch.device) -> Tensor:
        """Mask of hidden keys, of whole blocks: [queries, P]."""
        behind = self.behind(device)
        return behind < 0 if window is None else (behind < 0) | (behind >= window)


def _starts(parts: Sequence[QueryPart], window: int | None) -> Tensor | None:
    """The first key that each query of consecutive parts sees, counted from the parts' first key: [queries]."""
    if window is None:
        return None
    place = torch.arange(parts[0].first, parts[-1].end)
    return (place - parts[0].start - (window - 1)).clamp_(min=0)


def _by_kernel(x: Tensor, rule: AttentionRule, bias: ExactBias | None) -> bool:
    """Whether the kernel, which has neither soft cap nor bias, computes such heads."""
    return rule.soft_cap is None and bias is None and kernel.takes(x)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        how: ExactAttend,
        rule: AttentionRule,
        bias: ExactBias | None,
    ) -> Tensor:
        ctx.dtype, ctx.how, ctx.rule, ctx.bias = q.dtype, how, rule, bias
        keys, values = (how.exchange.gather(x.contiguous()).float() for x in (k, v))
        if not _by_kernel(q, rule, bias):
            ctx.save_for_backward(sinks, q, keys, values)
            return _attend_rows(how, rule, bias, (q, keys, values), sinks)
        out, lse_BNS = torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        for parts, (rows, places) in _stretches(how, q):
            here, keys_here = (rows, places), (rows, slice(parts[0].start, parts[-1].end))
            first = parts[0].first - parts[0].start
            qkv = _wide(q[here]), _wide(keys[keys_here]), _wide(values[keys_here])
            mixed, lse = kernel.attend(*qkv, first=first, starts_BS=_expand(_starts(parts, rule.window), rows))
            out[here], lse_BNS[rows, :, places] = mixed.transpose(1, 2), lse
        out, lse_BNS = join_sinks(out, lse_BNS, sinks)
        ctx.save_for_backward(sinks, q, keys, values, out, lse_BNS)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        sinks, q, keys, values, *outcome = ctx.saved_tensors
        how: ExactAttend = ctx.how
        dkeys, dvalues = (torch.zeros(x.shape, dtype=torch.int64, device=x.device) for x in (keys, values))
        to = torch.empty_like(q), dkeys, dvalues
        dsinks: Tensor | None
        if outcome:
            (out, lse_BNS), grad = outcome, grad.contiguous()
            _in_kernel(how, ctx.rule, (grad, q, keys, values, out, lse_BNS), to)
            dsinks = None if sinks is None else sinks_gradient(grad, out, lse_BNS, sinks)
        else:
            dsinks = None if sinks is None else torch.empty_like(sinks, memory_format=torch.contiguous_format)
            _by_torch(how, ctx.rule, ctx.bias, (grad, q, keys, values), to, sinks, dsinks)
        dk, dv = (how.grid.take(how.exchange.scatter_sum(x)).to(ctx.dtype) for x in (dkeys, dvalues))
        return to[0], dk, dv, dsinks, None, None, None


def _expand(starts: Tensor | None, rows: slice) -> Tensor | None:
    return None if starts is None else starts.expand(rows.stop - rows.start, -1)


def _attend_rows(
    how: ExactAttend, rule: AttentionRule, bias: ExactBias | None, of: tuple[Tensor, ...], sinks: Tensor | None
) -> Tensor:
    """The attention output by torch's operations, a chunk's queries at a time."""
    q, keys, values = of
    out = torch.empty_like(q)
    for part, here in _parts(how, q):
        places_of_keys, heads = slice(part.start, part.end), q.shape[2] // keys.shape[2]
        rows = _rows(q[here], keys.shape[2])
        mixed = attend_rows(
            rows,
            pad_keys(_by_head(keys[part.sequences, places_of_keys])),
            pad_keys(_by_head(values[part.sequences, places_of_keys])),
            part.hidden(rule.window, q.device).repeat(heads, 1),
            rule.soft_cap,
            None if bias is None else bias.compute(rows, part.behind(q.device), keys.shape[2]),
            None if sinks is None else _rows(sinks[here].unsqueeze(-1), keys.shape[2]),
        )
        out[here] = _unrows(mixed, q[here]).to(q.dtype)
    return out


def _in_kernel(
    how: ExactAttend, rule: AttentionRule, of: tuple[Tensor, ...], to: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The gradients of queries, keys and values, from the output's gradient, inputs, output and lse."""
    grad, q, keys, values, out, lse_BNS = of
    dq, dkeys, dvalues = to
    for parts, (rows, places) in _stretches(how, q):
        here, keys_here = (rows, places), (rows, slice(parts[0].start, parts[-1].end))
        gradient, outside = kernel.add_backward(
            _wide(grad[here]),
            (_wide(q[here]), _wide(keys[keys_here]), _wide(values[keys_here])),
            _wide(out[here]),
            lse_BNS[rows, :, places],
            first=parts[0].first - parts[0].start,
            starts_BS=_expand(_starts(parts, rule.window), rows),
            summed=kernel.Summed(
                dk=dkeys[keys_here].transpose(1, 2),
                dv=dvalues[keys_here].transpose(1, 2),
                ends=[part.end - parts[0].first for part in parts],
                scale=how.grid.scale,
                limit=how.grid.limit,
            ),
        )
        dq[here] = gradient.transpose(1, 2)
        if outside:
            how.grid.refuse(outside)


def _by_torch(
    how: ExactAttend,
    rule: AttentionRule,
    bias: ExactBias | None,
    of: tuple[Tensor, Tensor, Tensor, Tensor],
    to: tuple[Tensor, ...],
    sinks: Tensor | None,
    dsinks: Tensor | None,
) -> None:
    """The same by torch's operations, a chunk's queries at a time, and the gradient of the sinks."""
    grad, q, keys, values = of
    dq, dkeys, dvalues = to
    kv_heads = keys.shape[2]
    for part, here in _parts(how, q):
        places_of_keys = slice(part.start, part.end)
        count = part.end - part.start
        own_keys, own_values = (_by_head(x[part.sequences, places_of_keys]) for x in (keys, values))
        own_rows, drows = _rows(q[here], kv_heads), pad_rows(_rows(grad[here], kv_heads))
        rows, behind = pad_rows(own_rows), part.behind(q.device)
        hidden = pad_rows(part.hidden(rule.window, q.device).repeat(q.shape[2] // kv_heads, 1))
        added = None if bias is None else pad_rows(bias.compute(own_rows, behind, kv_heads))
        own_sinks = None if sinks is None else _rows(sinks[here].unsqueeze(-1), kv_heads)
        p, slope, of_sink = probabilities(rows, pad_keys(own_keys), hidden, rule.soft_cap, added, own_sinks)
        p = p[..., :count]
        dp = product(drows, own_values.transpose(1, 2))
        dvalues[part.sequences, places_of_keys] += _by_token(how.grid.put_(product(p.transpose(1, 2), drows)), kv_heads)
        delta = row_sum(p * dp)
        if dsinks is not None and of_sink is not None:
            dsinks[here] = _unrows(of_sink.mul_(delta).neg_(), q[here]).squeeze(-1).to(dsinks.dtype)
        ds = (dp - delta).mul_(p)
        if slope is not None:
            ds.mul_(slope[..., :count])
        by_bias = None
        if bias is not None:
            by_bias = bias.add_gradient(ds[:, : own_rows.shape[1]], own_rows, behind[:, :count], kv_heads)
        ds.mul_(q.shape[-1] ** -0.5)
        dq_rows = product(ds, own_keys)[:, : own_rows.shape[1]]
        dq[here] = _unrows(dq_rows if by_bias is None else dq_rows + by_bias, q[here]).to(q.dtype)
        dkeys[part.sequences, places_of_keys] += _by_token(how.grid.put_(product(ds.transpose(1, 2), rows)), kv_heads)


def _stretches(how: ExactAttend, q_BSNH: Tensor) -> Iterator[tuple[list[QueryPart], tuple[slice, slice]]]:
    """Consecutive parts with the same first key, and their slices."""
    begun: dict[tuple[int, int], tuple[list[QueryPart], tuple[slice, slice]]] = {}
    for part, (rows, places) in _parts(how, q_BSNH):
        key = rows.start, part.start
        if key in begun:
            parts, (_, before) = begun.pop(key)
            if parts[-1].end == part.first and before.stop == places.start:
                begun[key] = [*parts, part], (rows, slice(before.start, places.stop))
                continue
            yield parts, (rows, before)
        begun[key] = [part], (rows, places)
    yield from begun.values()


def _wide(x_BSNH: Tensor) -> Tensor:
    """[B, N, S, H], fp32."""
    return x_BSNH.float().transpose(1, 2)


def _parts(how: ExactAttend, q_BSNH: Tensor) -> Iterator[tuple[QueryPart, tuple[slice, slice]]]:
    """Each part of this rank's queries, and their slices."""
    length = q_BSNH.shape[1] // len(how.chunks)
    for at, chunk in enumerate(how.chunks):
        for part in how.parts(chunk, length, q_BSNH.shape[0]):
            shift = (at - chunk) * length
            yield part, (part.sequences, slice(part.first + shift, part.end + shift))


def _by_head(x_BSKH: Tensor) -> Tensor:
    """[B·K, S, H]."""
    B, S, K, H = x_BSKH.shape
    return x_BSKH.transpose(1, 2).reshape(B * K, S, H)


def _by_token(x: Tensor, kv_heads: int) -> Tensor:
    """[B·K, S, H] to [B, S, K, H]."""
    parted: Tensor = x.unflatten(0, (-1, kv_heads))
    return parted.transpose(1, 2)


def _rows(x_BCNH: Tensor, kv_heads: int) -> Tensor:
    """Queries grouped by key head: [B·K, G·C, H], fp32."""
    B, C, N, H = x_BCNH.shape
    return x_BCNH.float().reshape(B, C, kv_heads, N // kv_heads, H).permute(0, 2, 3, 1, 4).reshape(B * kv_heads, -1, H)


def _unrows(rows: Tensor, like_BCNH: Tensor) -> Tensor:
    """[B·K, G·C, H] to [B, C, N, H]."""
    B, C, N, _ = like_BCNH.shape
    kv_heads = rows.shape[0] // B
    G = N // kv_heads
    return rows[:, : G * C].view(B, kv_heads, G, C, -1).permute(0, 3, 1, 2, 4).reshape(B, C, N, -1)
