"""Attention of exact mode on a CPU: a query's result depends only on the query and the keys that it sees.

It is ``kernels.attention`` in fp32, with all rows computed alike: keys come in blocks of 64, counted from the first,
and keys that a row does not see add exact zeros. So its bits do not depend on other rows. What queries give keys does,
as sums over queries have an order: they are summed in parts, each part's sum is put on a grid
(``numerics.fixed_point``), and there they are added as integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.kernels.attention import LANES, KernelArgs, Qkv, compile_library, empty_like, missing


@dataclass(frozen=True, slots=True)
class Summed:
    """The sums of the gradients of keys and values.

    Attributes:
        dk, dv: int64 [B, K, T, H], multiples of 1 / scale.
        ends: the end of each part of the queries.
        scale: of the grid, a power of two.
        limit: the bound of a part's sum in size.
    """

    dk: Tensor
    dv: Tensor
    ends: Sequence[int]
    scale: float
    limit: float


def is_for(width: int, device: torch.device) -> bool:
    """Whether there is a kernel for heads of a width."""
    return device.type == "cpu" and width % LANES == 0 and not missing(device)


def takes(x: Tensor) -> bool:
    """Whether there is a kernel for such heads, [..., H], in fp32."""
    return is_for(x.shape[-1], x.device)


def attend(
    q_BNSH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    *,
    first: int = 0,
    starts_BS: Tensor | None = None,
    ends_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [B, N, S, H], and the lse [B, N, S] of ``kernels.attention``.

    Args:
        q_BNSH: queries, fp32 like keys and values.
        v_BKTH: values; those hidden from all queries must be finite.
        first: the place of the first query among the keys.
        starts_BS: the first key that each query sees, int64; None for 0.
        ends_BS: one past the last that it sees, likewise; None for its own place.
    """
    out, lse = empty_like(q_BNSH), torch.empty(q_BNSH.shape[:3])
    inputs = q_BNSH, k_BKTH, v_BKTH
    KernelArgs(inputs, out, lse, is_causal=True, starts=starts_BS, ends=ends_BS, first=first).run("superstep_attention")
    return out, lse


def add_backward(
    grad_BNSH: Tensor,
    inputs: Qkv,
    out_BNSH: Tensor,
    lse_BNS: Tensor,
    *,
    first: int,
    summed: Summed,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, float]:
    """The gradient of the queries; those of keys and values are added to ``summed``. All is fp32.

    Args:
        inputs: queries, keys and values, as in the forward pass.
        first, starts_BS: as in the forward pass.

    Returns:
        The gradient [B, N, S, H], and the largest of the parts' sums that were not below the limit, in size; 0 where
            all were.
    """
    grad, outside = empty_like(inputs[0]), torch.zeros(1)
    grads = grad_BNSH, grad, summed.dk, summed.dv
    call = KernelArgs(inputs, out_BNSH, lse_BNS, is_causal=True, starts=starts_BS, first=first, grads=grads)
    call.sum_by(torch.tensor(summed.ends), summed.scale, summed.limit, outside)
    call.run("superstep_attention_backward")
    return grad, outside.item()


def block_address() -> int | None:
    """The address of the function that computes a block of keys, for other layouts of keys; None without a library."""
    library = compile_library().library
    return None if library is None else ctypes.cast(library.superstep_attend_block, ctypes.c_void_p).value
