"""Flash attention on a GPU: supported inputs, and calls (``kernels.attention`` defines the result).

B  sequences    N  query heads           S  queries    H  width of one head
                K  key and value heads   T  keys
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import triton
from torch import Tensor

from superstep.kernels.gpu.attention_backward import (
    attention_delta,
    attention_keys_backward,
    attention_queries_backward,
)
from superstep.kernels.gpu.attention_forward import attention_forward
from superstep.kernels.gpu.attention_scores import BY_DISTANCE, NONE, SLOPES
from superstep.kernels.gpu.language import LEAST_SHARED_BYTES, pad_tile, read_shared_bytes
from superstep.kernels.position_bias import Bias, ByDistance, Slopes

DTYPES = (torch.float32, torch.bfloat16)
WIDEST = 256
"""The widest head; a program holds a tile of each operand."""

Qkv = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleKeys:
    """Which keys a query sees, and what is added to their scores.

    Attributes:
        is_causal: whether it sees only keys up to its own place.
        starts: int64 [B, S], the first key that each query sees; None for 0. A row never falls.
        window: the number of keys up to its own place that it sees; None for all.
        ahead: the place of the first query among the keys: 0 or more.
        bias: of distances, backwards from the query's place.
    """

    is_causal: bool = True
    starts: Tensor | None = None
    window: int | None = None
    ahead: int = 0
    bias: Bias | None = None

    def __post_init__(self) -> None:
        assert self.ahead >= 0


@dataclass(frozen=True, slots=True)
class TileSides:
    """The shape of a tile of scores.

    Attributes:
        rows: queries.
        columns: keys.
        warps: that compute it.
        stages: tiles of keys, or of queries, in flight from memory, with the one in use.
        needs_bytes: shared memory of the smallest chip with room for them.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 3
    needs_bytes: int = LEAST_SHARED_BYTES


Part = Literal["forward", "queries", "keys"]
Choices = Mapping[int, tuple[TileSides, ...]]
"""By the largest width of a head: tiles, those for the largest shared memory first."""

A100_BYTES, H100_BYTES = 163 * 1024, 227 * 1024
"""Shared memory of a program on compute capability 8.0, and on 9.0 and 10.0; the least of any is
``LEAST_SHARED_BYTES``.
"""

HALF_SIDES: Mapping[Part, Choices] = {
    "forward": {
        64: (TileSides(128, 64, 4),),
        128: (TileSides(128, 64, 8),),
        256: (TileSides(64, 32, 8, needs_bytes=A100_BYTES), TileSides(64, 32, 8, stages=2)),
    },
    "queries": {
        64: (TileSides(64, 64, 4),),
        128: (TileSides(64, 64, 8, needs_bytes=A100_BYTES), TileSides(64, 64, 8, stages=2)),
        256: (TileSides(32, 32, 8),),
    },
    "keys": {64: (TileSides(64, 64, 8),), 128: (TileSides(32, 64, 8),), 256: (TileSides(32, 32, 8),)},
}
"""For 16-bit heads: the largest tiles tried for which an H100 has registers, with as many stages as a chip has room
for. The compiler reports their needs (``tests/kernels/test_triton_compiles.py``).
"""

FULL_SIDES: Mapping[Part, Choices] = {
    "forward": {
        64: (TileSides(32, 32, 8),),
        128: (TileSides(32, 32, 8, needs_bytes=A100_BYTES), TileSides(32, 32, 8, stages=2)),
        256: (
            TileSides(32, 32, 8, needs_bytes=H100_BYTES),
            TileSides(32, 32, 8, stages=2, needs_bytes=A100_BYTES),
            TileSides(32, 32, 8, stages=1),
        ),
    },
    "queries": {
        64: (TileSides(32, 32, 8),),
        128: (TileSides(32, 32, 8, needs_bytes=A100_BYTES), TileSides(32, 32, 8, stages=2)),
        256: (
            TileSides(32, 32, 8, needs_bytes=H100_BYTES),
            TileSides(32, 32, 8, stages=1, needs_bytes=A100_BYTES),
            TileSides(16, 16, 4, stages=2),
        ),
    },
    "keys": {
        64: (TileSides(32, 32, 8),),
        128: (TileSides(32, 32, 8),),
        256: (
            TileSides(32, 32, 8, needs_bytes=H100_BYTES),
            TileSides(32, 16, 8, stages=2, needs_bytes=A100_BYTES),
            TileSides(16, 16, 4, stages=2),
        ),
    },
}
"""For fp32 heads: numbers take twice the room, and each of their products is three."""


def sides_of(part: Part, width: int, dtype: torch.dtype, shared_bytes: int) -> TileSides:
    """The tiles of a kernel on a chip with this much shared memory for a program."""
    choices = (FULL_SIDES if dtype == torch.float32 else HALF_SIDES)[part]
    tiles = next(tiles for limit, tiles in choices.items() if width <= limit)
    return next((sides for sides in tiles if sides.needs_bytes <= shared_bytes), tiles[-1])


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute with such tensors, [B, heads, tokens, H]: their 32-bit offsets must suffice."""
    return all(
        x.is_cuda
        and x.dtype == tensors[0].dtype in DTYPES
        and x.shape[-1] <= WIDEST
        and x.stride(-1) == 1
        and x.shape[2] * x.stride(2) < 2**31
        and x.shape[0] * x.shape[1] < 2**16
        for x in tensors
    )


def attend(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, sees: VisibleKeys) -> tuple[Tensor, Tensor]:
    """The output [B, N, S, H] and its log-sum-exp [B, N, S], fp32. Queries that see no key get 0 and -inf."""
    B, N, S, H = q_BNSH.shape
    sides = sides_of("forward", H, q_BNSH.dtype, read_shared_bytes(q_BNSH.device))
    out, lse = _like(q_BNSH), q_BNSH.new_empty(B, N, S, dtype=torch.float32)
    sizes = _kernel_args(q_BNSH, k_BKTH, sees)
    attention_forward[triton.cdiv(S, sides.rows), B * N](
        *(q_BNSH, k_BKTH, v_BKTH, out, lse),
        *(sizes.starts, sizes.bias, *sizes.numbers),
        *(x.stride()[:3] for x in (q_BNSH, k_BKTH, v_BKTH, out)),
        **sizes.constants(H, sides),
    )
    return out, lse


def attend_backward(
    grad_BNSH: Tensor, inputs: Qkv, out_BNSH: Tensor, lse_BNS: Tensor, sees: VisibleKeys
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The keys' share of the gradients of ``inputs`` (q, k, v), and that of a bias by distance, fp32.

    Args:
        grad_BNSH: the gradient of the whole output; ``out_BNSH`` and ``lse_BNS`` are also of all keys.
        inputs, sees: as in the forward pass.
    """
    q, k, v = inputs
    (B, N, S, H), (K, T) = q.shape, k.shape[1:3]
    sizes, lse = _kernel_args(q, k, sees), lse_BNS.contiguous()
    room = read_shared_bytes(q.device)
    rows, columns = sides_of("queries", H, q.dtype, room), sides_of("keys", H, q.dtype, room)
    dq, dk, dv, delta = _like(q), _like(k), _like(v), torch.empty_like(lse)
    dbias = torch.zeros_like(sizes.bias) if sizes.kind == BY_DISTANCE.value else None
    attention_delta[triton.cdiv(S, rows.rows), B * N](
        *(grad_BNSH, out_BNSH, delta, N, S, grad_BNSH.stride()[:3], out_BNSH.stride()[:3]),
        WIDTH=H,
        WIDE=pad_tile(H),
        ROWS=rows.rows,
    )
    given, strides = (grad_BNSH, q, k, v, lse, delta), tuple(x.stride()[:3] for x in (grad_BNSH, q, k, v))
    attention_queries_backward[triton.cdiv(S, rows.rows), B * N](
        *(*given, dq, sizes.starts, sizes.bias, sizes.bias if dbias is None else dbias, *sizes.numbers),
        *(*strides, dq.stride()[:3]),
        **sizes.constants(H, rows),
    )
    tiles = triton.cdiv(T, columns.columns)
    attention_keys_backward[tiles, B * K](
        *(*given, dk, dv, sizes.starts, _stops(sees, tiles, columns.columns, sizes.starts), sizes.bias, *sizes.numbers),
        *(*strides, dk.stride()[:3], dv.stride()[:3]),
        **sizes.constants(H, columns),
    )
    return dq, dk, dv, dbias


def attention(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, sees: VisibleKeys) -> Tensor:
    """``attend``'s output; gradients reach q, k, v, and a bias by distance."""
    bias = sees.bias.table if isinstance(sees.bias, ByDistance) else None
    return cast(Tensor, _Attention.apply(q_BNSH, k_BKTH, v_BKTH, bias, sees))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias_ND: Tensor | None, sees: VisibleKeys) -> Tensor:
        sees = sees if bias_ND is None else replace(sees, bias=ByDistance(bias_ND))
        out, lse = attend(q, k, v, sees)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sees = sees
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return *attend_backward(grad, (q, k, v), out, lse, ctx.sees), None


@dataclass(frozen=True, slots=True)
class _KernelArguments:
    """The common arguments of all kernels, in order."""

    starts: Tensor
    bias: Tensor
    numbers: tuple[int | float, ...]
    kind: int
    sees: VisibleKeys

    def constants(self, width: int, sides: TileSides) -> dict[str, Any]:
        # Tiles of biases would be read ahead like those of keys, and take more shared memory than these do.
        stages = 1 if self.kind == BY_DISTANCE.value else sides.stages
        return {
            "WIDTH": width,
            "WIDE": pad_tile(width),
            "ROWS": sides.rows,
            "COLUMNS": sides.columns,
            "CAUSAL": self.sees.is_causal,
            "STARTS": self.sees.starts is not None,
            "WINDOW": self.sees.window is not None,
            "BIAS": self.kind,
            "num_warps": sides.warps,
            "num_stages": stages,
        }


def _kernel_args(q_BNSH: Tensor, k_BKTH: Tensor, sees: VisibleKeys) -> _KernelArguments:
    """Missing tensors are passed as an address too, which is not read."""
    N, S, H = q_BNSH.shape[1:]
    starts = q_BNSH if sees.starts is None else sees.starts.to(q_BNSH.device).contiguous()
    match sees.bias:
        case None:
            kind, bias, last = NONE.value, q_BNSH, 0
        case Slopes(slopes=slopes):
            kind, bias, last = SLOPES.value, slopes.contiguous(), 0
        case ByDistance(table=table):
            kind, bias, last = BY_DISTANCE.value, table.detach().contiguous(), table.shape[1] - 1
    sizes = N, N // k_BKTH.shape[1], S, k_BKTH.shape[2], sees.ahead, sees.window or 0, last
    return _KernelArguments(starts, bias, (*sizes, 1 / math.sqrt(H)), kind, sees)


def _stops(sees: VisibleKeys, tiles: int, columns: int, starts: Tensor) -> Tensor:
    """One past the last query that sees any key of a tile, where documents end them: int64 [B, tiles]."""
    if sees.starts is None:
        return starts
    last = torch.arange(1, tiles + 1, device=starts.device) * columns - 1
    return torch.searchsorted(starts, last.expand(starts.shape[0], -1).contiguous(), right=True)


def _like(x_BNSH: Tensor) -> Tensor:
    """An empty tensor with a model's memory layout: [B, S, N, H]."""
    B, N, S, H = x_BNSH.shape
    return x_BNSH.new_empty(B, S, N, H).transpose(1, 2)
