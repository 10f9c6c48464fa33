"""LSTM and GRU cells in CUDA without cuDNN: one kernel after a cell's products.

Source in torch: ``aten/src/ATen/native/cuda/RNN.cu``, which defines these workspaces. Each is composed of operators of
the device. A layer of cuDNN computes the same, except its rounding and its dropout.

    B  sequences    H  width of the hidden state
"""

from __future__ import annotations

import torch
from torch import Tensor

Bias = Tensor | None


def add_bias(gates: Tensor, bias: Bias) -> Tensor:
    """Gates with an optional bias."""
    return gates if bias is None else gates + bias


def lstm_cell(
    of_input: Tensor,
    of_hidden: Tensor,
    cx_BH: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_thnn_fused_lstm_cell``: the hidden state, the cell's, and the gates for the backward pass."""
    i, f, g, o = (add_bias(of_input, input_bias) + add_bias(of_hidden, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy_BH = f * cx_BH + i * g
    return o * cy_BH.tanh(), cy_BH, torch.cat((i, f, g, o), 1)


def lstm_cell_back(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx_BH: Tensor, cy_BH: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``_thnn_fused_lstm_cell_backward_impl``: the gradients of the gates, of the cell's state and of a bias."""
    i, f, g, o = workspace.chunk(4, 1)
    of_hy = torch.zeros_like(cx_BH) if grad_hy is None else grad_hy
    of_cy = torch.zeros_like(cx_BH) if grad_cy is None else grad_cy
    tanh = cy_BH.tanh()
    of_cy = of_cy + of_hy * o * (1 - tanh * tanh)
    parts = of_cy * g * i * (1 - i), of_cy * cx_BH * f * (1 - f), of_cy * i * (1 - g * g), of_hy * tanh * o * (1 - o)
    gates = torch.cat(parts, 1)
    return gates, of_cy * f, gates.sum(0) if has_bias else None


def gru_cell(
    of_input: Tensor,
    of_hidden: Tensor,
    hx_BH: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``_thnn_fused_gru_cell``: the hidden state, and the workspace for the backward pass."""
    ir, ii, inew = add_bias(of_input, input_bias).chunk(3, 1)
    hr, hi, hn = add_bias(of_hidden, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    n = (inew + r * hn).tanh()
    return n + z * (hx_BH - n), torch.cat((r, z, n, hx_BH, hn), 1)


def gru_cell_back(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """``_thnn_fused_gru_cell_backward``: those of both kinds of gates, of the hidden state, of two biases."""
    r, z, n, hx_BH, hn = workspace.chunk(5, 1)
    of_n = grad_hy * (1 - z) * (1 - n * n)
    of_z = grad_hy * (hx_BH - n) * z * (1 - z)
    of_r = of_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat((of_r, of_z, of_n), 1), torch.cat((of_r, of_z, of_n * r), 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases


OF_GPU = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_back,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_back,
}
