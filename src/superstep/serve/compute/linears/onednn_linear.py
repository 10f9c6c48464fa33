"""Linears with weights in oneDNN's own layout, so that no call has to reorder them.

``F.linear`` passes a plain weight to oneDNN; in bf16 every call then reorders it again.

    O  outputs      I  inputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.serve.compute.linears.fused_linears import Product

PACKED_DTYPES = (torch.bfloat16, torch.float32)

ROWS = 64
"""The layout that oneDNN chooses for this number of rows is also the fastest for one row and for 256."""


def is_mkldnn_weight(weight: Tensor) -> bool:
    """Whether oneDNN can multiply by the weight: it is on a CPU, and torch is built with oneDNN."""
    return weight.device.type == "cpu" and torch.backends.mkldnn.is_available()


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can convert the weight to oneDNN's layout on this machine."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in names)
    return (
        is_mkldnn_weight(weight)
        and weight.dtype in PACKED_DTYPES
        and has_operators
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_weight(weight_OI: Tensor, bias_O: Tensor | None, *, rows: int = ROWS) -> Product | None:
    """The product with the weight in oneDNN's layout; None where this is not supported, such as on a GPU.

    Args:
        weight_OI: the weight.
        bias_O: the bias.
        rows: typical number of input rows: oneDNN's layout may depend on it. Any number gives a correct result.
    """
    if not can_pack(weight_OI):
        return None
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), rows)

    def product(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, ordered, bias_O, "none", [], "")
        return out

    return product
