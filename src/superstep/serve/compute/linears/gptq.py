"""Codes of 4 bits chosen from a calibration text: what rounding one input's weight loses, the later ones make up for
(GPTQ, Frantar 2022).

    X  inputs of a linear over the text, [T, I]        H = XᵀX, damped        U  upper Cholesky factor of H⁻¹
    for each input i:    e = (w_i - decoded_i) / U_ii        w_j -= e · U_ij for all j > i

The scale and zero of a group are chosen when its first input is reached, from the weights as they are then. Blocks are
quantized in order, so that each sees inputs that come through the blocks before as they are served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from superstep.model.custom.is_plain import is_plain_linear
from superstep.model.decoder import flash
from superstep.serve.compute.linears.fused_linears import Pack, Product, join, rows_of
from superstep.serve.compute.linears.quantize import (
    MOST_4,
    ZERO_4,
    QuantizedWeight,
    WeightFormat,
    to_4_bits,
)
from superstep.serve.compute.serving_model import ServedUnits

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it."""


@torch.no_grad()
def to_4_bits_by_inputs(weight_OI: Tensor, hessian_II: Tensor, group: int) -> QuantizedWeight:
    """Codes of 4 bits, with the least squared error of the outputs rather than of the weights.

    Args:
        weight_OI: of the linear.
        hessian_II: XᵀX of its inputs.
        group: inputs that share a scale.
    """
    w, h = weight_OI.float().clone(), hessian_II.double()
    h.diagonal().add_(DAMPING * h.diagonal().mean().clamp(min=1e-12))
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True).float()
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales, zeros = [], []
    for first in range(0, w.shape[1], group):
        columns = slice(first, first + group)
        chosen = to_4_bits(w[:, columns], group)
        assert chosen.zero is not None
        scale, zero = chosen.scale[:, 0].float(), chosen.zero[:, 0].float()
        errors, inner = torch.empty_like(w[:, columns]), upper[columns, columns]
        for at in range(group):
            column = w[:, first + at]
            code = ((column - zero) / scale).round_().add_(ZERO_4).clamp_(0, MOST_4)
            error = (column - ((code - ZERO_4) * scale + zero)) / inner[at, at]
            w[:, first + at + 1 : first + group] -= error[:, None] * inner[at, at + 1 :]
            codes[:, first + at], errors[:, at] = code.to(torch.uint8), error
        w[:, first + group :] -= errors @ upper[columns, first + group :]
        scales.append(chosen.scale)
        zeros.append(chosen.zero)
    return QuantizedWeight(codes, torch.cat(scales, 1), torch.cat(zeros, 1))


@torch.no_grad()
def calibrate(served: ServedUnits, row_format: WeightFormat, windows: Sequence[Sequence[int]]) -> dict[nn.Linear, Pack]:
    """The products of the blocks' linears, by the first of those that read one input. The modules have the decoded
    weights afterwards.

    Args:
        served: one rank's units, with their weights.
        row_format: of 4 bits.
        windows: of tokens, of one length.
    """
    assert row_format.group is not None
    embed, *blocks, _ = served.modules
    device = next(embed.parameters()).device
    states = [embed(torch.tensor([list(window)], device=device)) for window in windows]
    packs: dict[nn.Linear, Pack] = {}
    for number, block in enumerate(blocks):
        given = {"exchange": served.exchange} if served.run.shape.moe else {}
        run = partial(block, attend=flash, positions=None, **given)
        every = (layers for layers, _ in rows_of(block, is_plain_linear))
        rows = [layers for layers in every if layers[0].weight.shape[1] % row_format.group == 0]
        with _sums_of(rows) as sums:
            for state in states:
                run(state)
        for layers in rows:
            weight_OI, _ = join(layers, lambda param: param)
            quantized = to_4_bits_by_inputs(weight_OI, sums[layers[0]], row_format.group)
            parts = quantized.weight().split([layer.out_features for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                layer.weight.copy_(part)
            packs[layers[0]] = partial(_make_product, row_format, quantized)
        if number + 1 < len(blocks):
            states = [run(state) for state in states]
    return packs


def _make_product(row_format: WeightFormat, quantized: QuantizedWeight, _: Tensor, bias_O: Tensor | None) -> Product:
    return row_format.product(quantized, bias_O)


@contextmanager
def _sums_of(rows: Sequence[tuple[nn.Linear, ...]]) -> Iterator[Mapping[nn.Linear, Tensor]]:
    """XᵀX of the inputs of linears within the block, by the first that reads an input."""
    sums = {layers[0]: torch.zeros(2 * [layers[0].weight.shape[1]], device=layers[0].weight.device) for layers in rows}

    def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x_TI = inputs[0].flatten(0, -2).float()
        sums[layer].addmm_(x_TI.t(), x_TI)  # type: ignore[index]

    hooks = [layers[0].register_forward_pre_hook(add) for layers in rows]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
