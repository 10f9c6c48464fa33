"""Settings of a rank's layers in exact mode: the pieces of every sum, and the grid of each gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from superstep.comm.mesh import Group
from superstep.engine.exact.linear import ReductionCut
from superstep.engine.layers.grad_accumulation import GradientSink, GradientSums, hand_over_once
from superstep.model.unit import ParamSpec
from superstep.numerics.fixed_point import PARAMETER, Grid, RangeExcess
from superstep.plan.model.shape import ModelShape
from superstep.plan.resolution.reduction_grain import Grain
from superstep.plan.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactLayers:
    """Settings of a rank's layers in exact mode.

    Attributes:
        grain: the pieces of every sum.
        rules: which axes are cut over tp, for any degree.
        chunks: chunks of the sequence on this rank.
        parts: parts of the sequence that this rank sends to a mixture of experts, which tp splits too.
        stream_parts: parts of the residual stream here, which sequence parallelism splits.
        group: the tp ranks; None where tp = 1.
        sinks: for each trained parameter, the target of its gradient: int64, of its shape.
    """

    grain: Grain
    rules: Rules
    chunks: int
    parts: int
    stream_parts: int
    group: Group | None
    sinks: Mapping[nn.Parameter, GradientSink]

    def add_on_grid(self, parameter: nn.Parameter) -> None:
        """Let autograd's gradient of a trained parameter be added on the grid."""
        if parameter in self.sinks:
            hand_over_once(parameter, self.sinks[parameter].add)

    def add_all_on_grid(self, layer: nn.Module) -> None:
        """The same of all that a layer has itself."""
        for parameter in layer.parameters(recurse=False):
            self.add_on_grid(parameter)

    def trains(self, layer: nn.Module) -> bool:
        """Whether a layer has trained parameters itself."""
        return any(parameter in self.sinks for parameter in layer.parameters(recurse=False))

    def cut(self, param: ParamSpec) -> ReductionCut:
        """The cut of a linear layer's sums; the dims of its weight are (output, input)."""
        if "shared_ffn" in param.axes:
            return ReductionCut(
                cells_in=1, cells_out=1, is_cut_in=False, is_cut_out=False, chunks=self.parts, group=None
            )
        if "joined" in param.axes:  # it works on the stream
            return ReductionCut(
                cells_in=1, cells_out=1, is_cut_in=False, is_cut_out=False, chunks=self.stream_parts, group=None
            )
        is_cut_out, is_cut_in = (self.rules.cut(axis) == "tp" for axis in param.axes)
        cells = self.grain.cells // (1 if self.group is None else self.group.size())
        return ReductionCut(
            cells_in=cells if is_cut_in else 1,
            cells_out=cells if is_cut_out else 1,
            is_cut_in=is_cut_in,
            is_cut_out=is_cut_out,
            chunks=self.chunks,
            group=self.group,
            sections=tuple(rows * cells // self.grain.cells for rows in param.sections) if is_cut_out else (),
        )


def settings_without_gradients(module: nn.Module, grain: Grain, rules: Rules, group: Group | None) -> ExactLayers:
    """The settings of a served module, of whole sequences."""
    nowhere = GradientSink(torch.empty(0), PARAMETER, GradientSums())
    sinks = dict.fromkeys(module.parameters(), nowhere)
    return ExactLayers(grain=grain, rules=rules, chunks=1, parts=1, stream_parts=1, group=group, sinks=sinks)


MOST_USES = 16
"""The most uses of a user's parameter in one microbatch, over all units that share it, for which the grid has room."""


def grid_of(spec: ParamSpec, grain: Grain, shape: ModelShape | None, excess: RangeExcess) -> Grid:
    """The grid of a parameter's gradient, for the most terms on any layout: the chunks of every microbatch add a
    product each; a lookup, a norm or a position bias every token. A tied table has both. A user's layers add autograd's
    gradient of each microbatch.
    """
    products = grain.microbatches * max(grain.chunks, grain.parts)
    if shape is None:
        terms = products * MOST_USES
    elif len(spec.axes) == 2 and spec.axes[0] == "experts":  # biases
        terms = grain.tokens
    elif "experts" in spec.axes:
        terms = grain.sequences * grain.parts
    elif "vocab" in spec.axes:
        terms = grain.tokens + products
    elif "head_dim" in spec.axes:
        terms = grain.tokens * max(shape.heads, shape.delta.value_heads if shape.delta else 0)
    elif len(spec.axes) != 2 or "distances" in spec.axes:  # a vector, a convolution or a position bias
        terms = grain.tokens
    else:
        terms = products
    return PARAMETER.of(terms, f"the gradient of {spec.name}", excess)
