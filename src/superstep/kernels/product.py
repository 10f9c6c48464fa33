"""Products on a CPU: of fp32 by the faster of torch's two libraries, of bf16 in fp32 where that is faster.

Torch uses MKL, which is slow on other makers' processors: on an AMD EPYC of Zen 5 oneDNN is 2.1 times as fast, on Zen 4
equally fast. And not every processor multiplies bf16 faster than fp32: a core of a Xeon (Emerald Rapids) without AMX
reaches 75 GFLOP/s with bf16 and 125 with fp32, and those without AVX-512 have no bf16 instruction. There factors are
widened, and the result is rounded once, as always. The faster one is measured, once in a process.

    T  rows    I  inputs    O  outputs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

FASTER = 1.3
"""How many times faster oneDNN must be: with less, one process would choose it and the next one not."""

FASTER_IN_FP32 = 1.1
"""How many times faster products of bf16 must be in fp32. Processors are far from it: 1.5 on that Xeon, about 0.5 where
bf16 is twice as fast.
"""

SLAB = 2**20
"""Numbers of a factor that are widened at once: 4 MiB, and never a whole table of 32,000 words."""

NARROW = 64
"""The least columns of a slab: where a long inner dim leaves fewer, it is cut."""

HALVES = (torch.bfloat16, torch.float16)
"""Numbers of 16 bits. Few processors multiply fp16: a core of an AMD EPYC at 18 GFLOP/s, and fp32 at 78."""

_REAL = (Tensor, nn.Parameter)
"""Real tensors; a trace's fake tensors have another type."""


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x [..., I] times a weight: [..., O]."""
    if by_fp32(x, weight_OI):
        out: Tensor = _by_fp32(x.flatten(0, -2), weight_OI.t())
        return out.view(*x.shape[:-1], -1)
    return _onednn(x, weight_OI) if by_onednn(x, weight_OI) else F.linear(x, weight_OI)


def product(left_TI: Tensor, right_IO: Tensor) -> Tensor:
    """left · right: [T, O], in the dtype of the right one."""
    if by_fp32(left_TI, right_IO):
        out: Tensor = _by_fp32(left_TI, right_IO)
        return out
    return _onednn(left_TI, right_IO.t()) if by_onednn(left_TI, right_IO) else left_TI @ right_IO


def product_into(out_TO: Tensor, left_TI: Tensor, right_IO: Tensor, scale: float) -> Tensor:
    """out = scale · left · right."""
    if by_fp32(left_TI, right_IO):
        return torch.mul(_by_fp32(left_TI, right_IO), scale, out=out_TO)
    if by_onednn(left_TI, right_IO):
        return torch.mul(_onednn(left_TI, right_IO.t()), scale, out=out_TO)
    return out_TO.addmm_(left_TI, right_IO, beta=0, alpha=scale)


def of_any_rows(left_TI: Tensor, right_IO: Tensor) -> Tensor:
    """left · right, for varying numbers of rows. For each new number oneDNN compiles code for products of bf16, which
    takes 1.4 ms on a Xeon with AMX, and the product itself 0.4: so rows are padded to one of four numbers in an octave.
    """
    rows = len(left_TI)
    if type(left_TI) not in _REAL or left_TI.device.type != "cpu" or left_TI.dtype != torch.bfloat16 or rows < NARROW:
        return left_TI @ right_IO
    step = 1 << (rows.bit_length() - 3)
    return (F.pad(left_TI, (0, 0, 0, -rows % step)) @ right_IO)[:rows]


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN is faster here."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    with _disable_current_modes(), torch.inference_mode():
        x_TI, weight_OI = torch.ones(256, 512), torch.ones(512, 512)
        mkl_s = _least_s(lambda: F.linear(x_TI, weight_OI))
        onednn_s = _least_s(lambda: _onednn(x_TI, weight_OI))
    return onednn_s * FASTER < mkl_s


@cache
def prefers_fp32() -> bool:
    """Whether products of bf16 are faster in fp32 here."""
    with _disable_current_modes(), torch.inference_mode():
        # As many rows as a step has: of few rows widening the weight is much of it.
        x_TI, weight_OI = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1024, 512), (1024, 512)))
        plain_s = _least_s(lambda: F.linear(x_TI, weight_OI), times=4)
        fp32_s = _least_s(lambda: _by_fp32(x_TI, weight_OI.t()), times=4)
    return fp32_s * FASTER_IN_FP32 < plain_s


@torch.library.custom_op("superstep::product_by_fp32", mutates_args=())
def _by_fp32(left_TI: Tensor, right_IO: Tensor) -> Tensor:
    """left · right in the dtype of the right one: a torch operation, so that a recompute may keep its result."""
    inner, columns = right_IO.shape
    if inner > SLAB // NARROW:
        total_TO = torch.zeros(len(left_TI), columns)
        rows = max(1, SLAB // columns)
        for left, right in zip(left_TI.split(rows, dim=1), right_IO.split(rows), strict=True):
            total_TO.addmm_(left.float(), right.float())
        return total_TO.to(right_IO.dtype)
    wide_TI, out_TO = left_TI.float(), right_IO.new_empty(len(left_TI), columns)
    slabs = SLAB // inner
    for out, right in zip(out_TO.split(slabs, dim=1), right_IO.split(slabs, dim=1), strict=True):
        out.copy_(product(wide_TI, right.float()))
    return out_TO


def add_by_fp32(total_TO: Tensor, left_TI: Tensor, right_IO: Tensor, scale: float) -> None:
    """total += scale · left · right in fp32, widening some rows of the left one at a time."""
    wide_IO, rows = right_IO.float(), max(1, SLAB // left_TI.shape[1])
    for total, left in zip(total_TO.split(rows), left_TI.split(rows), strict=True):
        wide = left.float()
        if total.dtype == torch.float32 and not by_onednn(wide, wide_IO):
            total.addmm_(wide, wide_IO, alpha=scale)
        else:
            total.add_(product(wide, wide_IO), alpha=scale)


def _onednn(x: Tensor, weight_OI: Tensor) -> Tensor:
    """oneDNN's product. A weight with gaps between rows, such as every other row of a tensor, it multiplies one number
    after the other: [384, 800] took 1.2 s in place of 0.6 ms on a Sapphire Rapids core.
    """
    if not (weight_OI.is_contiguous() or weight_OI.t().is_contiguous()):
        weight_OI = weight_OI.contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, None, "none", [], "")
    return out


def _least_s(run: Callable[[], Tensor], times: int = 8) -> float:
    """The shortest of some runs, by this thread's clock: other processes only make a run longer."""
    run()
    medians = []
    for _ in range(times):
        begin_s = time.thread_time()
        run()
        medians.append(time.thread_time() - begin_s)
    return min(medians)


def by_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN multiplies them."""
    is_fp32 = left.dtype == right.dtype == torch.float32 and left.device.type == "cpu"
    return is_fp32 and type(left) in _REAL and type(right) in _REAL and left.numel() > 0 and prefers_onednn()


def by_fp32(left: Tensor, right: Tensor) -> bool:
    """Whether they are multiplied in fp32, the right one being fp16, or bf16 where that is faster."""
    is_half = right.dtype in HALVES and left.dtype in (torch.float32, right.dtype)
    is_here = left.device.type == right.device.type == "cpu" and type(left) in _REAL and type(right) in _REAL
    is_some = is_half and is_here and left.numel() > 0 and right.numel() > 0
    return is_some and (right.dtype == torch.float16 or prefers_fp32())
