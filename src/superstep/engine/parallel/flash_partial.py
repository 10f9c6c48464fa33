"""Attention of some queries to some keys with torch's fused kernels; the parts can be merged.

    B  sequences    N  query heads           S  queries    H  width of one head
                    K  key and value heads   T  keys

To merge a softmax over parts of the keys, each part's output and log-sum-exp (lse) suffice. In the backward, each
part's gradients follow from the output and lse of the *whole*, as scores are computed again (Dao 2022, alg. 4): P =
exp(scores - lse), dScores = P · (dP - rowsum(dOut · out)).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.kernels import attention as kernel
from superstep.model.fused_attention import expand_heads, fill_up, has_flash

_ATEN = torch.ops.aten

_EFFICIENT_ALIGN = 32
"""The memory-efficient kernel pads rows of lse to a multiple of this."""

_FEW_QUERIES = 128
"""Up to this number the CPU's backward kernel takes 6 to 13 times as long for bf16 as for fp32 (AVX-512, torch 2.13);
at 256 they are about equal, and beyond that bf16 is faster.
"""


def attend_block(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, is_causal: bool, is_compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """The output [B, N, S, H] and lse [B, N, S], fp32; neither shares memory with an argument. With ``is_compiled``,
    ``kernels.attention`` computes it where it supports the heads.
    """
    if is_compiled and kernel.takes(q_BNSH, k_BKTH, v_BKTH):
        return kernel.attend(q_BNSH, k_BKTH, v_BKTH, is_causal=is_causal)
    if not q_BNSH.is_cuda:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q_BNSH, k_BKTH, v_BKTH, 0.0, is_causal)
        return out, lse
    width, scale = q_BNSH.shape[-1], 1 / math.sqrt(q_BNSH.shape[-1])
    q, k, v = (fill_up(x) for x in (q_BNSH, k_BKTH, v_BKTH))
    if has_flash(q):
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
        return out[..., :width], lse
    op = _ATEN._scaled_dot_product_efficient_attention
    wide = expand_heads(k, q), expand_heads(v, q)
    out, lse, *_ = op(q, *wide, None, compute_log_sumexp=True, is_causal=is_causal, scale=scale)
    return out[..., :width], lse[..., : q.shape[2]]


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part of the keys into the output and lse of earlier parts, in place; ``out`` and ``lse`` are fp32.

    The part's weight is exp(part_lse) / (exp(lse) + exp(part_lse)): as a sigmoid it cannot overflow.
    """
    out.lerp_(part.float(), torch.sigmoid(part_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def attend_block_backward(
    grad_BNSH: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out_BNSH: Tensor,
    lse_BNS: Tensor,
    *,
    is_causal: bool,
    is_compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of ``inputs`` (q, k, v).

    Args:
        grad_BNSH: the gradient of the whole output; the next two are also of all keys, not of this block's.
        inputs: of the forward.
        out_BNSH: the output.
        lse_BNS: its lse.
        is_causal: of the forward.
        is_compiled: see ``attend_block``.
    """
    if is_compiled and kernel.takes(grad_BNSH, *inputs, out_BNSH):
        return kernel.attend_backward(grad_BNSH, inputs, out_BNSH, lse_BNS, is_causal=is_causal)
    q, k, v = inputs
    out, lse = out_BNSH, lse_BNS.contiguous()
    if not q.is_cuda:
        op = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        dtype = torch.float32 if q.shape[2] <= _FEW_QUERIES else q.dtype
        given = (x.to(dtype) for x in (grad_BNSH, q, k, v, out))
        dq, dk, dv = (share.to(q.dtype) for share in op(*given, lse, 0.0, is_causal))
        return dq, dk, dv
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # unused by the kernels without dropout
    width, scale = q.shape[-1], 1 / math.sqrt(q.shape[-1])
    grad, q, k, v, out = (fill_up(x) for x in (grad_BNSH, q, k, v, out))
    if has_flash(q):
        op = _ATEN._scaled_dot_product_flash_attention_backward
        longest = q.shape[2], k.shape[2]
        gradients = op(grad, q, k, v, out, lse, None, None, *longest, 0.0, is_causal, no_seed, no_seed, scale=scale)
    else:
        op = _ATEN._scaled_dot_product_efficient_attention_backward
        lse = F.pad(lse, (0, -lse.shape[2] % _EFFICIENT_ALIGN), value=torch.inf)
        wide, wanted = (expand_heads(k, q), expand_heads(v, q)), [True, True, True, False]
        gradients = op(grad, q, *wide, None, out, lse, no_seed, no_seed, 0.0, wanted, is_causal, scale=scale)
    dq, dk, dv = (x[..., :width] for x in gradients[:3])
    dk, dv = (x if x.shape[1] == k.shape[1] else x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv
