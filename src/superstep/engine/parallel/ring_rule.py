"""Ring attention by a rule: windows, capped scores and position biases, by ``numerics.attention.blockwise_attention``.

A rank's tokens are two chunks of the sequence. Each of its chunks meets each chunk of keys that is not later: within
such a pair both are runs of neighbouring positions, which is what biases and windows need.

    B  sequences    N  query heads           S  a rank's own tokens    c  tokens of a chunk, S / 2
                    K  key and value heads   H  width of one head
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from superstep.engine.parallel.flash_partial import merge
from superstep.numerics.attention.attention_operator import no_gradient
from superstep.numerics.attention.blockwise_attention import LEAST_LSE, ScoreRule, attend_part, attend_part_backward
from superstep.plan.sharding.sequence import AttentionBlock


@dataclass(frozen=True, slots=True)
class RingRule:
    """The rule of a sequence that is cut over the ranks of a ring.

    Attributes:
        rule: of a whole sequence, without starts.
        starts: the start of each token's document, of the whole sequences: int64 [B, cp · S].
        rank, cp: this rank, of how many.
    """

    rule: ScoreRule
    starts: Tensor | None
    rank: int
    cp: int

    def pairs(self, source: int, tokens: int) -> Iterator[tuple[slice, slice, ScoreRule]]:
        """Own queries and keys of ``source``, with the rule between them."""
        chunk = tokens // 2
        for mine, place in self._chunks(self.rank, chunk):
            for keys, first_key in self._chunks(source, chunk):
                if first_key <= place:
                    starts = None if self.starts is None else self.starts[:, place : place + chunk] - first_key
                    yield mine, keys, replace(self.rule, ahead=place - first_key, starts=starts)

    def _chunks(self, rank: int, chunk: int) -> Iterator[tuple[slice, int]]:
        """Each chunk of a rank: its slice of the rank's tokens, and the position of its first."""
        for number, at in enumerate((rank, 2 * self.cp - 1 - rank)):
            yield slice(number * chunk, (number + 1) * chunk), at * chunk


def attend_by_rule(
    q: Tensor, round_of_keys: Iterable[tuple[AttentionBlock, Tensor]], ring: RingRule
) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, H] and lse [B, N, S]. ``round_of_keys``: each rank's keys and values, [2, B, S, K, H]."""
    B, S, N, H = q.shape
    out_BNSH, lse_BNS = (q.new_zeros(B, N, S, H, dtype=torch.float32), q.new_full((B, N, S), LEAST_LSE).float())
    for block, (k, v) in round_of_keys:
        for mine, keys, rule in ring.pairs(block.source, S):
            part = q.new_zeros(B, S // 2, N, H)
            part_lse = torch.full_like(lse_BNS[:, :, mine], LEAST_LSE)
            attend_part(q[:, mine], k[:, keys], v[:, keys], rule, part, part_lse)
            merge(out_BNSH[:, :, mine], lse_BNS[:, :, mine], part.transpose(1, 2), part_lse)
    return out_BNSH.transpose(1, 2).to(q.dtype).contiguous(), lse_BNS


class RuleGradients:
    """This rank's share of the gradients.

    Args:
        of: the output's gradient, q, output and lse of the own tokens.
    """

    def __init__(self, of: tuple[Tensor, ...], ring: RingRule) -> None:
        self.grad, self.q, self.out, self.lse = of
        self.ring, self.bias = ring, ring.rule.bias
        self.dq = torch.zeros_like(self.q, dtype=torch.float32)
        self.dbias = no_gradient(self.q) if self.bias is None else torch.zeros_like(self.bias).contiguous()

    def add(self, block: AttentionBlock, kv: Tensor, dkv: Tensor | None) -> Tensor:
        """The gradient of a rank's keys and values, [2, B, S, K, H] fp32, added to ``dkv``."""
        dkv = torch.zeros_like(kv, dtype=torch.float32) if dkv is None else dkv
        dk, dv = dkv.transpose(2, 3)
        for mine, keys, rule in self.ring.pairs(block.source, self.q.shape[1]):
            dq = torch.zeros_like(self.dq[:, mine])
            of = self.grad[:, mine], self.q[:, mine], kv[0, :, keys], kv[1, :, keys], self.out[:, mine]
            to = dq, dk[:, :, keys], dv[:, :, keys], self.dbias
            attend_part_backward((*of, self.lse[:, :, mine]), rule, to)
            self.dq[:, mine].add_(dq)
        return dkv

    def of_queries(self) -> Tensor:
        return self.dq.to(self.q.dtype).contiguous()

    def of_bias(self) -> Tensor:
        return self.dbias
