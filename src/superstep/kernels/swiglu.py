"""SwiGLU's gate: reference, and kernel for a CPU, which keeps only its two inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.kernels import cpu_library


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020)."""
    return F.silu(gate) * up


def takes(gate: Tensor, up: Tensor) -> bool:
    return cpu_library.takes(gate, up) and gate.shape == up.shape


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``reference`` by the kernel: fp32 inside, rounded once."""
    out: Tensor = _swiglu(gate, up)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, by the kernel; each element depends only on those at its place."""
    dgate, dup = _swiglu_backward(grad, gate, up)
    return dgate, dup


@torch.library.custom_op("superstep::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    cpu_library.run("swiglu", gate.dtype == torch.bfloat16, gate, up, out, gate.numel())
    return out


@torch.library.custom_op("superstep::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    cpu_library.run("swiglu_backward", gate.dtype == torch.bfloat16, grad, gate, up, dgate, dup, gate.numel())
    return dgate, dup


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _empty(gate)


@_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(gate), _empty(gate)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return backward(grad, *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_keep)
