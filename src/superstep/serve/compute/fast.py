"""What fast mode changes of a model's units, from outside: how linears multiply, and how norms are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superstep.model.norm import RMSNorm
from superstep.runtime.accumulate import replace_forward
from superstep.serve.compute.few_rows import few_rows, few_rows_of_8_bits
from superstep.serve.compute.kernels.build import Built
from superstep.serve.compute.linears import Linears, Pack
from superstep.serve.compute.packed import packed
from superstep.serve.compute.quantize import format_named


def make_fast(modules: Sequence[nn.Module], products: Built, *, quantize: str | None) -> Linears:
    """Change the units of a rank. The weights must be there; after new ones, ``lay_out`` of what this gives.

    Not for exact mode: how a row is rounded depends here on how many rows there are.

    Args:
        modules: the units, whose parameters need no gradient.
        products: the operations compiled here, or why there are none.
        quantize: a format of ``quantize.FORMATS``; None keeps the weights.

    Raises:
        ConfigError: there is no format of that name.
    """
    for norm in (layer for module in modules for layer in module.modules() if type(layer) is RMSNorm):
        if products.ops is not None and norm.weight.dtype == torch.bfloat16 and norm.weight.device.type == "cpu":
            replace_forward(norm, _norm(products.ops, norm))
    if quantize is None:
        return Linears(modules, few_rows(products, packed))
    row = format_named(quantize)
    return Linears(modules, _pack(products, row.name), _pack(products, row.head))


def _pack(products: Built, name: str) -> Pack:
    row = format_named(name)
    return few_rows_of_8_bits(products, row) if row.activations == 8 else row.pack


def _norm(ops: Any, norm: RMSNorm) -> Any:  # noqa: ANN401
    def forward(x: Tensor) -> Tensor:
        out: Tensor = ops.rms_norm(x.contiguous(), norm.weight, norm.eps)
        return out

    return forward
