"""The table of layers: the one place that chooses the implementation of each layer, and their order.

In place of the layer, the first that applies:

    the loss        the head's product, which the loss multiplies by itself, a chunk of tokens at a time
    dropout         random numbers by place
    sparse tables   gradients of the touched rows                                  sparse=True
    exact mode      sums of one order                                              numerics.exact
    compiled        torch.compile's code; gradients are added when whole           numerics.compile
    fast mode       kernels for norms, gates and the rotary embedding              numerics.kernels
                    adapted linears, then linears, embeddings and experts, whose gradients go straight into the buffer

Around it, inner ones first, all that apply:

    batch norm          which samples of the global batch its groups are
    tensor parallel     a lookup or a product is summed, an input enters, the unit's output is split
    experts             each tp rank has its share of the tokens
    compiled            experts, dropout and batch norm stay out of torch.compile
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from superstep.comm.mesh import Group
from superstep.engine.exact.layer_settings import ExactLayers
from superstep.engine.exact.modules import exact_layers
from superstep.engine.exact.user_layers import exact_user_layers
from superstep.engine.flat.touched_rows import RowSink
from superstep.engine.layers.fused import LANGUAGES, LayerKernels, list_fused_layers
from superstep.engine.layers.grad_accumulation import (
    GradientSums,
    accumulating_after,
    accumulating_straight,
    embed_by_rows,
    hand_over_once,
)
from superstep.engine.layers.implementation import Choice, Forward, Implementation, install
from superstep.engine.layers.lora import adapting_straight
from superstep.engine.parallel.expert import splitting_tokens
from superstep.engine.parallel.tensor import EXACT_OVER_TP, OVER_TP, splitting
from superstep.model.by_place.batch_norm import BatchNorm, normalise_by_place
from superstep.model.by_place.dropout import drop_by_place, is_dropout
from superstep.model.custom.is_plain import is_plain_sparse_embedding
from superstep.model.decoder import Head
from superstep.model.moe import MixtureOfExperts
from superstep.model.unit import UnitSpec
from superstep.numerics.noise import CurrentNoise
from superstep.plan.rules import Rules

RowSinks: TypeAlias = Mapping[nn.Parameter, RowSink]
"""The target of each sparse gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Inputs of the choice of a unit's layers.

    Attributes:
        tp: the ranks that tensors are cut over; None where they are whole.
        rules: which axes are cut.
        sums: of layers, for additions to gradient buffers.
        sequence_parallel: the stream is split over the sequence.
        is_first: the unit takes the input, with whole sequences.
        is_compiled: torch.compile makes its code.
        noise: of the unit's forward, for its dropout.
        kernels: of the loss, norms, gates and the rotary embedding.
        exact: of exact mode; None in fast mode.
        rows: of tables with sparse gradients.
        is_users: the model is a user's own.
    """

    tp: Group | None
    rules: Rules
    sums: GradientSums
    sequence_parallel: bool
    is_first: bool
    is_compiled: bool
    noise: CurrentNoise = field(default_factory=CurrentNoise)
    kernels: LayerKernels = "torch"
    exact: ExactLayers | None = None
    rows: RowSinks = field(default_factory=dict)
    is_users: bool = False


def install_layers(module: nn.Module, spec: UnitSpec, context: LayerContext) -> tuple[Choice, ...]:
    """Set the forward of each layer of a unit's module; the choices."""
    return install(module, _computing(module, spec, context), _around(module, spec, context))


def _computing(module: nn.Module, spec: UnitSpec, context: LayerContext) -> tuple[Implementation, ...]:
    dropping = dropping_by_place(context.noise) + adding_rows(context.rows, context.sums)
    if context.exact is not None and context.is_users:  # its loss takes logits
        return dropping + exact_user_layers(spec, context.exact)
    first = keep_for_loss(module, spec, "torch" if context.exact is not None else context.kernels) + dropping
    if context.exact is not None:
        return first + exact_layers(spec, context.exact, context.noise)
    if context.is_compiled:
        return first + accumulating_after()
    fused = list_fused_layers(context.kernels)
    return first + fused + adapting_straight(context.sums, context.noise) + accumulating_straight(context.sums)


def _around(module: nn.Module, spec: UnitSpec, context: LayerContext) -> tuple[Implementation, ...]:
    around = normalising_by_place(context.noise)
    if context.tp is not None:
        around += splitting(
            module,
            spec,
            context.tp,
            context.rules,
            OVER_TP if context.exact is None else EXACT_OVER_TP,
            sequence_parallel=context.sequence_parallel,
            is_first=context.is_first,
        )
        if not context.sequence_parallel:
            around += splitting_tokens(context.tp)
    return around + _NOT_COMPILED if context.is_compiled else around


def keep_for_loss(module: nn.Module, spec: UnitSpec, kernels: LayerKernels = "torch") -> tuple[Implementation, ...]:
    """The head of a decoder, unless the unit has a loss of its own. The input of a cut head still enters there."""
    if not isinstance(module, Head) or spec.loss is not None:
        return ()
    head = module.lm_head
    return (
        Implementation(
            "product left to the loss" + (f" in {LANGUAGES[kernels]}" if kernels in LANGUAGES else ""),
            "decoder",
            lambda path, layer: layer is head or layer is module.soft_cap,
            lambda path, layer, inner: _same,
        ),
    )


def dropping_by_place(noise: CurrentNoise) -> tuple[Implementation, ...]:
    """Dropout modules that draw by place (``numerics.noise``)."""
    return (
        Implementation(
            "dropout by place",
            "model",
            lambda path, layer: is_dropout(layer),
            lambda path, layer, inner: drop_by_place(path, layer, noise),
        ),
    )


def adding_rows(sinks: RowSinks, sums: GradientSums) -> tuple[Implementation, ...]:
    """Embeddings with ``sparse=True``: rows of their gradient are added to the buffer, and marked."""

    def build(path: str, layer: nn.Embedding, inner: Forward) -> Forward:
        table = layer.get_parameter("weight")
        sink = sinks[table]
        hand_over_once(table, sink.add)
        return embed_by_rows(layer, lambda: sink.add_rows, sums) if is_plain_sparse_embedding(layer) else inner

    return (
        Implementation(
            "gradient of touched rows",
            "sparse=True",
            lambda path, layer: isinstance(layer, nn.Embedding) and layer.weight in sinks,
            build,
        ),
    )


def normalising_by_place(noise: CurrentNoise) -> tuple[Implementation, ...]:
    """Batch norm, which needs to know the place of its samples in the global batch."""
    return (
        Implementation(
            "batch norm over groups of samples",
            "model",
            lambda path, layer: isinstance(layer, BatchNorm),
            lambda path, layer, inner: normalise_by_place(layer, noise),
        ),
    )


def _same(x: Tensor) -> Tensor:
    return x


def _outside_compile(path: str, layer: nn.Module, inner: Forward) -> Forward:
    forward: Forward = torch.compiler.disable(inner)
    return forward


_NOT_COMPILED = (
    Implementation(
        "outside torch.compile",  # an expert's number of rows is only known at run time
        "numerics.compile",
        lambda path, layer: isinstance(layer, MixtureOfExperts),
        _outside_compile,
    ),
    Implementation(
        "outside torch.compile",  # a step's number would be compiled in
        "numerics.compile",
        lambda path, layer: is_dropout(layer) or isinstance(layer, BatchNorm),
        _outside_compile,
    ),
)
