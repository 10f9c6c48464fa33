"""Ring attention (Liu, Zaharia, Abbeel 2023) over a zig-zag cut of the sequence.

Queries stay, keys and values go round: each rank computes its queries against the keys it has, while these are already
on their way to the next rank and the next ones on their way here. Which scores a rank computes of which keys is
``plan.split.sequence.blocks``. Going back, keys and values go round once more; their gradients travel with them, gather
each rank's share, and make one hop more than the keys to come home.

    B  sequences    N  query heads           S  a rank's own tokens
                    K  key and value heads   T  keys of a block
    H  width of one head

Both directions are operators of torch's dispatcher rather than plain Python, for what stands around them: selective
recompute can keep the result and not each block's (those are cp times as large, and computing them again would send
everything again), and a compiler sees one opaque call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from superstep.plan.split.sequence import Block, blocks
from superstep.runtime.mesh import Group
from superstep.runtime.parallel.flash_block import attend_block, attend_block_backward, merge

# Both rings are under way at once, on one group.
_KEYS_TAG, _GRADIENTS_TAG = 0, 1


@dataclass(frozen=True, slots=True)
class RingAttend:
    """Causal attention of a sequence cut in zig-zag over the ranks of ``group``, as ``model.decoder.Attend``.

    Each rank gives and gets its own tokens, in the order of ``plan.split.sequence.positions``. What is kept for the
    backward is the rank's own q, k, v, output and lse. Nothing else may be under way on the group.
    """

    group: Group

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """The mixed values: [B, S, N, H]."""
        out_BSNH: Tensor = ring_attention(q_BSNH, k_BSKH, v_BSKH, self.group.group_name)[0]
        return out_BSNH


@dataclass(frozen=True, slots=True)
class _Hop:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    works: list[dist.Work]
    arriving: Tensor

    @classmethod
    def start(cls, leaving: Tensor, group: Group, tag: int) -> Self:
        size, me = group.size(), group.rank()
        if size == 1:
            return cls([], leaving)
        arriving = torch.empty_like(leaving)
        # As one batch: NCCL runs a group's operations in turn, and every rank would wait to be received from.
        ends = [
            dist.P2POp(dist.isend, leaving, group=group, tag=tag, group_peer=(me + 1) % size),
            dist.P2POp(dist.irecv, arriving, group=group, tag=tag, group_peer=(me - 1) % size),
        ]
        return cls(dist.batch_isend_irecv(ends), arriving)

    def finish(self) -> Tensor:
        """What came; what left may change from now on."""
        for work in self.works:
            work.wait()
        return self.arriving


def _round(kv: Tensor, group: Group) -> Iterator[tuple[Block, Tensor]]:
    """Each block with the keys and values of its source, [2, B, K, T, H]; meanwhile the next ones are coming."""
    mine = blocks(group.rank(), group.size())
    for block in mine:
        hop = None if block is mine[-1] else _Hop.start(kv, group, _KEYS_TAG)
        yield block, kv[:, :, block.keys(kv.shape[2])].transpose(2, 3)
        if hop is not None:
            kv = hop.finish()


def _named(group: str) -> Group:
    # An operator's arguments are tensors, numbers and strings; torch's own collectives go by this name, too.
    return _resolve_process_group(group)  # type: ignore[arg-type]


@torch.library.custom_op("superstep::ring_attention", mutates_args=())
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, H] and its log-sum-exp [B, N, S], fp32; ``group`` is the name of a process group."""
    q_BNSH = q.transpose(1, 2)
    out_BNSH: Tensor | None = None
    for block, (k_BKTH, v_BKTH) in _round(torch.stack((k, v)), _named(group)):
        part, part_lse = attend_block(_asking(q_BNSH, block), k_BKTH, v_BKTH, is_causal=block.is_causal)
        if out_BNSH is None:  # the own keys come first, and every query sees itself
            out_BNSH, lse_BNS = part.float(), part_lse.clone(memory_format=torch.contiguous_format)
        else:
            merge(_asking(out_BNSH, block), _asking(lse_BNS, block), part, part_lse)
    assert out_BNSH is not None
    return out_BNSH.transpose(1, 2).to(q.dtype).contiguous(), lse_BNS


def _asking(x: Tensor, block: Block) -> Tensor:
    """The queries of a block out of all: dim 2 of [B, N, S, ...]."""
    return x[:, :, block.queries(x.shape[2])]


@torch.library.custom_op("superstep::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """The gradients of q, and of k and v stacked."""
    ring = _named(group)
    grad_BNSH, q_BNSH, out_BNSH = (x.transpose(1, 2) for x in (grad, q, out))
    dq_BNSH = torch.zeros_like(q_BNSH, dtype=torch.float32)
    hop: _Hop | None = None
    for block, (k_BKTH, v_BKTH) in _round(torch.stack((k, v)), ring):
        dq, dk, dv = attend_block_backward(
            _asking(grad_BNSH, block),
            (_asking(q_BNSH, block), k_BKTH, v_BKTH),
            _asking(out_BNSH, block),
            _asking(lse, block),
            is_causal=block.is_causal,
        )
        _asking(dq_BNSH, block).add_(dq)
        share = torch.stack((dk.transpose(1, 2), dv.transpose(1, 2))).float()
        if hop is None:  # the own keys come first, whole
            dkv = share
        else:
            dkv = hop.finish()
            dkv[:, :, block.keys(dkv.shape[2])] += share
        hop = _Hop.start(dkv, ring, _GRADIENTS_TAG)
    assert hop is not None
    return dq_BNSH.transpose(1, 2).to(q.dtype).contiguous(), hop.finish().to(k.dtype)


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
    B, S, N, _ = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(B, N, S, dtype=torch.float32)


@_ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), k.new_empty(2, *k.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    *qkv, ctx.group = inputs
    ctx.save_for_backward(*qkv, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401
    dq, dkv = _ring_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.group)
    return dq, dkv[0], dkv[1], None


ring_attention.register_autograd(_backward, setup_context=_keep)
