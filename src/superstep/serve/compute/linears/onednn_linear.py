"""Linears whose weights are in oneDNN's own order, so that no call has to bring them into it.

``F.linear`` hands oneDNN the weight as it lies; for bf16 the reordering is then a part of every product.

    O  outputs      I  inputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.serve.compute.linears.fused_linears import Product

PACKED_DTYPES = (torch.bfloat16, torch.float32)

ROWS = 64
"""The order that oneDNN chooses for so many rows is the fastest for one row as well, and for 256."""


def is_mkldnn_weight(weight: Tensor) -> bool:
    """Whether oneDNN is there for a weight that lies so."""
    return weight.device.type == "cpu" and torch.backends.mkldnn.is_available()


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch, on this machine, lays out such a weight."""
    there = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return (
        is_mkldnn_weight(weight)
        and weight.dtype in PACKED_DTYPES
        and there
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def packed(weight_OI: Tensor, bias_O: Tensor | None, *, rows: int = ROWS) -> Product | None:
    """The product with the weight in oneDNN's order; None where that is not to be had, on a GPU for one.

    Args:
        weight_OI: the weight.
        bias_O: the bias.
        rows: of the input, most of the time: the order that oneDNN chooses may depend on it. Any number is right.
    """
    if not can_pack(weight_OI):
        return None
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), rows)

    def product(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, ordered, bias_O, "none", [], "")
        return out

    return product
