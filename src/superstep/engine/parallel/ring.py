"""Ring attention (Liu, Zaharia, Abbeel 2023) over a zig-zag cut of the sequence.

Queries stay, keys and values go round: each rank computes its queries against its current keys, while these are sent to
the next rank and the next ones arrive. ``plan.sharding.sequence.blocks`` gives the scores of each block. In the
backward, keys and values go round once more; their gradients travel with them, collect each rank's share, and make one
hop more than the keys to return.

    B  sequences    N  query heads           S  a rank's own tokens
                    K  key and value heads   T  keys of a block
    H  width of one head

Both directions are operators of torch's dispatcher rather than plain Python: selective recompute can keep the result
and not each block's (those are cp times as large, and computing them again would send everything again), and a compiler
sees one opaque call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from superstep.comm.mesh import Group
from superstep.engine.parallel.flash_partial import attend_block, attend_block_backward, merge
from superstep.engine.parallel.flash_varlen import attend_parts, attend_parts_backward, bounds, starts_of
from superstep.engine.parallel.ring_rule import RingRule, RuleGradients, attend_by_rule
from superstep.kernels import attention as kernel
from superstep.kernels.position_bias import Bias
from superstep.numerics.attention.attention_operator import connect_gradients, no_gradient
from superstep.numerics.attention.attention_sinks import join_sinks
from superstep.numerics.attention.blockwise_attention import ScoreRule
from superstep.plan.model.attention_rule import PLAIN, AttentionRule
from superstep.plan.sharding.documents import RankTokens, tiles
from superstep.plan.sharding.sequence import AttentionBlock, blocks

# Both rings run at once, on one group.
KEYS_TAG, GRADIENTS_TAG = 0, 1


@dataclass(frozen=True, slots=True)
class RingAttend:
    """Causal attention of a sequence cut in zig-zag over the ranks of ``group``, as ``model.decoder.Attend``.

    Inputs and output are the rank's own tokens, in the order of ``plan.sharding.sequence.positions``. The backward
    keeps the rank's own q, k, v, output and lse. The group may have no other communication meanwhile.
    """

    group: Group
    starts: Tensor | None = None
    """With a document mask: the start of each token's document, of the whole sequences and on the host: [B, cp · S]."""

    is_compiled: bool = False
    """Whether ``kernels.attention`` computes the blocks, where it supports the heads."""

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        rule: AttentionRule = PLAIN,
        bias: Bias | None = None,
        sinks_BSN: Tensor | None = None,
    ) -> Tensor:
        """The attention output: [B, S, N, H]."""
        window = rule.window_in(q_BSNH.shape[1] * self.group.size()) or 0
        tensors = self.starts, None if bias is None else bias.tensor, sinks_BSN
        settings = self.is_compiled, window, rule.soft_cap or 0.0, self.group.group_name
        out_BSNH: Tensor = ring_attention(q_BSNH, k_BSKH, v_BSKH, *tensors, *settings)[0]
        return out_BSNH


@dataclass(frozen=True, slots=True)
class Hop:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    works: list[dist.Work]
    arriving: Tensor

    @classmethod
    def start(cls, leaving: Tensor, group: Group, tag: int) -> Self:
        size, me = group.size(), group.rank()
        if size == 1:
            return cls([], leaving)
        arriving = torch.empty_like(leaving)
        # As one batch: NCCL runs a group's operations in turn, and every rank would wait for a receiver.
        ends = [
            dist.P2POp(dist.isend, leaving, group=group, tag=tag, group_peer=(me + 1) % size),
            dist.P2POp(dist.irecv, arriving, group=group, tag=tag, group_peer=(me - 1) % size),
        ]
        return cls(dist.batch_isend_irecv(ends), arriving)

    def finish(self) -> Tensor:
        """The arrived tensor; the sent one may change from now on."""
        for work in self.works:
            work.wait()
        return self.arriving


def pass_keys_round(kv: Tensor, group: Group) -> Iterator[tuple[AttentionBlock, Tensor]]:
    """Each block with all keys and values of its source, [2, B, T, K, H]; the next ones arrive meanwhile."""
    mine = blocks(group.rank(), group.size())
    for block in mine:
        hop = None if block is mine[-1] else Hop.start(kv, group, KEYS_TAG)
        yield block, kv
        if hop is not None:
            kv = hop.finish()


@dataclass(frozen=True, slots=True)
class _Documents:
    """Document starts of each row, and their cuts of a rank's blocks."""

    rows: Sequence[Sequence[int]]
    cp: int
    rank: int

    @classmethod
    def of(cls, starts: Tensor | None, group: Group) -> Self | None:
        return None if starts is None else cls(bounds(starts), group.size(), group.rank())

    @property
    def cuts(self) -> list[tuple[int, ...]]:
        """The own tokens of each document."""
        return [RankTokens(row[-1], self.cp, self.rank).cuts(row) for row in self.rows]

    def rectangles(self, block: AttentionBlock) -> Iterator[_Rectangle]:
        for number, row in enumerate(self.rows):
            for tile in tiles(block, row, cp=self.cp, rank=self.rank):
                yield _Rectangle(slice(number, number + 1), tile.queries, tile.keys)


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Rows, own queries, and a source's keys that precede all of these."""

    rows: slice
    queries: slice
    keys: slice

    def asking(self, x: Tensor) -> Tensor:
        """A slice of the own [B, N, S, ...]."""
        return x[self.rows, :, self.queries]

    def answering(self, kv: Tensor) -> Tensor:
        """A slice of the source's [2, B, T, K, H]."""
        return kv[:, self.rows, self.keys]


def rectangles_of(block: AttentionBlock, tokens: int, documents: _Documents | None) -> Iterator[_Rectangle]:
    """The computed rectangles with another rank's keys."""
    if documents is not None:
        yield from documents.rectangles(block)
    else:
        yield _Rectangle(slice(None), block.queries(tokens), block.keys(tokens))


def _group_by_name(group: str) -> Group:
    # An operator's arguments are tensors, numbers and strings; torch's own collectives use this name, too.
    return _resolve_process_group(group)  # type: ignore[arg-type]


@torch.library.custom_op("superstep::ring_attention", mutates_args=())
def ring_attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    is_compiled: bool,
    window: int,
    soft_cap: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, H] and its log-sum-exp [B, N, S], fp32.

    Args:
        q, k, v: the own ones.
        starts, is_compiled: see ``RingAttend``.
        bias: the tensor of a ``kernels.position_bias.Bias``.
        sinks: of the own queries; they join once, after the keys of all ranks.
        window, soft_cap: as in ``plan.model.attention_rule``; 0 for none.
        group: the name of a process group.
    """
    ring = _group_by_name(group)
    round_of_keys = pass_keys_round(torch.stack((k, v)), ring)
    if bias is not None or window or soft_cap:
        rule = ScoreRule(window=window, soft_cap=soft_cap, bias=bias)
        out, lse = attend_by_rule(q, round_of_keys, RingRule(rule, starts, ring.rank(), ring.size()))
        return join_sinks(out, lse, sinks)
    documents = _Documents.of(starts, ring)
    q_BNSH = q.transpose(1, 2)
    out_BNSH: Tensor | None = None
    for block, kv in round_of_keys:
        if out_BNSH is None:  # the own keys come first, and every query sees itself
            part, part_lse = _own(q_BNSH, kv, documents, is_compiled=is_compiled)
            out_BNSH, lse_BNS = part.float(), part_lse.clone(memory_format=torch.contiguous_format)
            continue
        for at in rectangles_of(block, q.shape[1], documents):
            k_BKTH, v_BKTH = at.answering(kv).transpose(2, 3)
            part, part_lse = attend_block(at.asking(q_BNSH), k_BKTH, v_BKTH, is_causal=False, is_compiled=is_compiled)
            merge(at.asking(out_BNSH), at.asking(lse_BNS), part, part_lse)
    assert out_BNSH is not None
    return join_sinks(out_BNSH.transpose(1, 2).to(q.dtype).contiguous(), lse_BNS, sinks)


def _own(q_BNSH: Tensor, kv: Tensor, documents: _Documents | None, *, is_compiled: bool) -> tuple[Tensor, Tensor]:
    k_BKSH, v_BKSH = kv.transpose(2, 3)
    if documents is None:
        return attend_block(q_BNSH, k_BKSH, v_BKSH, is_causal=True, is_compiled=is_compiled)
    if is_compiled and kernel.takes(q_BNSH, k_BKSH, v_BKSH):
        return kernel.attend(q_BNSH, k_BKSH, v_BKSH, is_causal=True, starts_BS=starts_of(documents.cuts))
    return attend_parts(q_BNSH, k_BKSH, v_BKSH, documents.cuts)


@torch.library.custom_op("superstep::ring_attention_backward", mutates_args=())
def _ring_attention_backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    is_compiled: bool,
    window: int,
    soft_cap: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, of k and v stacked, and of the bias: this rank's share."""
    ring = _group_by_name(group)
    of = grad, q, out, lse
    gradients: _PlainGradients | RuleGradients
    if bias is not None or window or soft_cap:
        rule = ScoreRule(window=window, soft_cap=soft_cap, bias=bias)
        gradients = RuleGradients(of, RingRule(rule, starts, ring.rank(), ring.size()))
    else:
        gradients = _PlainGradients(of, _Documents.of(starts, ring), is_compiled=is_compiled)
    hop: Hop | None = None
    for block, kv in pass_keys_round(torch.stack((k, v)), ring):
        dkv = gradients.add(block, kv, None if hop is None else hop.finish())
        hop = Hop.start(dkv, ring, GRADIENTS_TAG)
    assert hop is not None
    return gradients.of_queries(), hop.finish().to(k.dtype), gradients.of_bias()


class _PlainGradients:
    """This rank's share of the gradients, without a rule.

    Args:
        of: the output's gradient, q, output and lse of the own tokens.
    """

    def __init__(self, of: tuple[Tensor, ...], documents: _Documents | None, *, is_compiled: bool) -> None:
        grad, q, out, self.lse = of
        self.grad_BNSH, self.q_BNSH, self.out_BNSH = (x.transpose(1, 2) for x in (grad, q, out))
        self.documents, self.is_compiled = documents, is_compiled
        self.dq_BNSH = self.q_BNSH

    def add(self, block: AttentionBlock, kv: Tensor, dkv: Tensor | None) -> Tensor:
        """The gradient of a block's keys and values, [2, B, T, K, H] fp32, added to ``dkv``; own ones come first."""
        grad, q, out = self.grad_BNSH, self.q_BNSH, self.out_BNSH
        if dkv is None:
            whole = grad, q, kv, out, self.lse, self.documents
            dq_BNSH, dk, dv = _own_backward(*whole, is_compiled=self.is_compiled)
            self.dq_BNSH = dq_BNSH.float()
            return _stack_gradients(dk, dv)
        for at in rectangles_of(block, q.shape[2], self.documents):
            k_BKTH, v_BKTH = at.answering(kv).transpose(2, 3)
            inputs, part = (at.asking(q), k_BKTH, v_BKTH), (at.asking(out), at.asking(self.lse))
            dq, dk, dv = attend_block_backward(
                at.asking(grad), inputs, *part, is_causal=False, is_compiled=self.is_compiled
            )
            at.asking(self.dq_BNSH).add_(dq)
            at.answering(dkv).add_(_stack_gradients(dk, dv))
        return dkv

    def of_queries(self) -> Tensor:
        return self.dq_BNSH.transpose(1, 2).to(self.q_BNSH.dtype).contiguous()

    def of_bias(self) -> Tensor:
        return no_gradient(self.q_BNSH)


connect_gradients(ring_attention, _ring_attention_backward, is_stacked=True)


def _own_backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: _Documents | None,
    *,
    is_compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    k_BKSH, v_BKSH = kv.transpose(2, 3)
    inputs = q, k_BKSH, v_BKSH
    if documents is None:
        return attend_block_backward(grad, inputs, out, lse, is_causal=True, is_compiled=is_compiled)
    if is_compiled and kernel.takes(grad, *inputs, out):
        starts_BS = starts_of(documents.cuts)
        return kernel.attend_backward(grad, inputs, out, lse, is_causal=True, starts_BS=starts_BS)
    return attend_parts_backward(grad, inputs, out, lse, documents.cuts)


def _stack_gradients(dk_BKTH: Tensor, dv_BKTH: Tensor) -> Tensor:
    """Gradients in the format of the ring: [2, B, T, K, H], fp32."""
    return torch.stack((dk_BKTH.transpose(1, 2), dv_BKTH.transpose(1, 2))).float()
