"""Products of fp32 matrices on a CPU, by the faster of the two libraries that torch has: MKL and oneDNN.

Torch takes MKL, which does not use all that other makers' processors can: on an AMD EPYC with AVX-512 oneDNN has 2.1
times its speed. Which is faster is measured, once in a process.

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
"""So many times as fast oneDNN must be: nearer than that a process would take one, and the next one the other."""

_REAL = (Tensor, nn.Parameter)
"""What has numbers: a rehearsal's tensors are of another type."""


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x [..., I] times a weight: [..., O]."""
    return _onednn(x, weight_OI) if by_onednn(x, weight_OI) else F.linear(x, weight_OI)


def product(left_TI: Tensor, right_IO: Tensor) -> Tensor:
    """left · right: [T, O]."""
    return _onednn(left_TI, right_IO.t()) if by_onednn(left_TI, right_IO) else left_TI @ right_IO


def product_into(out_TO: Tensor, left_TI: Tensor, right_IO: Tensor, scale: float) -> Tensor:
    """out = scale · left · right."""
    if by_onednn(left_TI, right_IO):
        return torch.mul(_onednn(left_TI, right_IO.t()), scale, out=out_TO)
    return out_TO.addmm_(left_TI, right_IO, beta=0, alpha=scale)


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN is the faster one here."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    with _disable_current_modes(), torch.inference_mode():
        x_TI, weight_OI = torch.ones(256, 512), torch.ones(512, 512)
        mkl_s = _least_s(lambda: F.linear(x_TI, weight_OI))
        onednn_s = _least_s(lambda: _onednn(x_TI, weight_OI))
    return onednn_s * FASTER < mkl_s


def _onednn(x: Tensor, weight_OI: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, None, "none", [], "")
    return out


def _least_s(run: Callable[[], Tensor], times: int = 8) -> float:
    """Of some runs the shortest: others only make a run longer."""
    run()
    found = []
    for _ in range(times):
        begin_s = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin_s)
    return min(found)


def by_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN multiplies them."""
    is_fp32 = left.dtype == right.dtype == torch.float32 and left.device.type == "cpu"
    return is_fp32 and type(left) in _REAL and type(right) in _REAL and left.numel() > 0 and prefers_onednn()
