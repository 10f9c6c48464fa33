"""What fast mode changes of a model's units, from outside: how linears multiply, and norms, gates and turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from superstep.model.decoder import Attention
from superstep.model.feedforward import FeedForward
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
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
    if products.ops is not None:
        ropes: dict[Rope, Turn] = {}  # blocks share theirs, and with it the tables of a step
        for module in modules:
            _compile_rest(module, products.ops, ropes)
    if quantize is None:
        return Linears(modules, few_rows(products, packed))
    row = format_named(quantize)
    return Linears(modules, _pack(products, row.name), _pack(products, row.head))


def _pack(products: Built, name: str) -> Pack:
    row = format_named(name)
    return few_rows_of_8_bits(products, row) if row.activations == 8 else row.pack


def _compile_rest(module: nn.Module, ops: Any, ropes: dict[Rope, Turn]) -> None:  # noqa: ANN401
    """Norms, gates and rotations of bf16 models by one operation each: a call costs more than what is computed."""
    if any(held.dtype != torch.bfloat16 or held.device.type != "cpu" for held in module.parameters()):
        return
    for layer in module.modules():
        if type(layer) is RMSNorm:
            replace_forward(layer, _norm(ops, layer))
        elif type(layer) is FeedForward:
            replace_forward(layer, _gated(ops, layer))
        elif type(layer) is Attention:
            layer.rope = cast(Rope, ropes.setdefault(layer.rope, Turn(layer.rope, ops)))


def _norm(ops: Any, norm: RMSNorm) -> Any:  # noqa: ANN401
    def forward(x: Tensor) -> Tensor:
        out: Tensor = ops.rms_norm(x.contiguous(), norm.weight, norm.eps)
        return out

    return forward


def _gated(ops: Any, layer: FeedForward) -> Any:  # noqa: ANN401
    def forward(x_BSD: Tensor) -> Tensor:
        gate, up = (part.flatten(0, -2) for part in (layer.gate_proj(x_BSD), layer.up_proj(x_BSD)))
        out: Tensor = layer.down_proj(ops.gated(gate, up).view(*x_BSD.shape[:-1], -1))
        return out

    return forward


class Turn:
    """A model's rotary embedding at given positions, each turn one operation.

    Args:
        rope: whose tables it takes, once for each tensor of positions.
        ops: ``products``.
    """

    def __init__(self, rope: Rope, ops: Any) -> None:  # noqa: ANN401
        self._rope = rope
        self._ops = ops
        self._positions: Tensor | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_BSNH: Tensor, positions: Tensor | None = None) -> Tensor:
        """As ``Rope`` does, but for the rounding of a product."""
        if positions is None or positions.dim() == 1:
            return self._rope(x_BSNH, positions)
        if self._tables is None or positions is not self._positions:
            self._tables = self._rope.tables(positions, x_BSNH.dtype)
            self._positions = positions
        cosine, sine = self._tables
        out: Tensor = self._ops.turned(x_BSNH.flatten(0, 1), cosine.contiguous(), sine.contiguous())
        return out.view(x_BSNH.shape)
