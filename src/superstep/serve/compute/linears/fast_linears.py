"""Fast linears: replace the products of a model's linears, from outside its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from superstep.kernels.compile_cpp import BuildResult
from superstep.serve.compute.linears.fused_linears import Linears, Pack
from superstep.serve.compute.linears.onednn_linear import pack_weight
from superstep.serve.compute.linears.panel_weights import in_panels
from superstep.serve.compute.linears.quantize import format_named


def make_fast(
    modules: Sequence[nn.Module],
    built: BuildResult,
    *,
    quantize: str | None,
    first_packs: Mapping[nn.Linear, Pack] | None = None,
) -> Linears:
    """Replace the linears of a rank's units. The weights must be loaded; after an update, call ``lay_out`` of the
    result.

    Args:
        modules: the units; their parameters need no gradient.
        built: the compiled decoder, or the reason why there is none.
        quantize: a format of ``quantize.FORMATS``; None keeps the weights.
        first_packs: as for ``Linears``.

    Raises:
        ConfigError: the format is unknown.
    """
    if quantize is None:
        return Linears(modules, pack_weight if built.library is None else in_panels(built.library, pack_weight))
    row = format_named(quantize)
    return Linears(modules, _pack(built, row.name), _pack(built, row.head), first_packs)


def _pack(built: BuildResult, name: str) -> Pack:
    row = format_named(name)
    if built.library is None or row.activations != 8:
        return row.pack
    return in_panels(built.library, row.pack, row)
