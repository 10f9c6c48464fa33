"""Exact mode put on a plain module from outside: its layers' sums become those of ``exact_linear``.

A layer gives whole results on every tensor-parallel rank, so that entering and leaving a region where heads or ffn are
split (see ``tensor_parallel``) adds nothing up: with sequence parallelism they gather and cut, else they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor, nn

from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.engine.exact.experts import exact_combine, exact_gate, exact_grouped_linear
from superstep.engine.exact.linear import ReductionCut, exact_embedding, exact_linear, exact_norm
from superstep.engine.exact.lora import exact_adapted
from superstep.engine.exact.loss import exact_loss
from superstep.engine.exact.swiglu import exact_gate_of, exact_silu
from superstep.engine.layers.fused import gated
from superstep.engine.layers.grad_accumulation import GradientSink, hands_to, replace_forward
from superstep.errors import ConfigError
from superstep.model.decoder import Head
from superstep.model.experts import Experts, GroupedLinear
from superstep.model.feedforward import FeedForward
from superstep.model.is_plain import is_plain_embedding, is_plain_linear
from superstep.model.lora import AdaptedLinear
from superstep.model.moe import Gate, MixtureOfExperts
from superstep.model.norm import RMSNorm
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.numerics.exact_self_check import first_difference
from superstep.numerics.fixed_point import PARAMETER, Excess, Grid
from superstep.numerics.objective import Aim
from superstep.plan.lora import ENDS
from superstep.plan.model.shape import ModelShape
from superstep.plan.reduction_grain import Grain
from superstep.plan.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactLayers:
    """What a rank's layers need to know in exact mode.

    Attributes:
        grain: the pieces of every sum.
        rules: what is cut over tp, on whatever degree.
        chunks: chunks of the sequence that this rank holds.
        parts: parts of the sequence that this rank brings to a mixture of experts, which tp shares out too.
        group: the tp ranks; None where tp = 1.
        sinks: for each parameter that is trained, where its gradient is added: int64, of its shape.
    """

    grain: Grain
    rules: Rules
    chunks: int
    parts: int
    group: Group | None
    sinks: Mapping[nn.Parameter, GradientSink]

    def cut(self, param: ParamSpec) -> ReductionCut:
        """How the sums of a linear layer are cut; the dims of its weight are (output, input)."""
        if "shared_ffn" in param.axes:
            return ReductionCut(
                cells_in=1, cells_out=1, is_cut_in=False, is_cut_out=False, chunks=self.parts, group=None
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
        )


difference = cache(first_difference)
"""A machine stays what it is: a process that opens an engine for each of many layouts asks once."""


def require_exact(compute: torch.dtype, device: Device) -> None:
    """See that exact mode's promise can be kept here, on one thread: more would order sums as they come.

    Raises:
        ConfigError: this machine orders some sum by what is computed beside it.
    """
    if device.kind == "cpu":
        torch.set_num_threads(1)
    broken = difference(compute, device.torch)
    if broken is not None:
        raise ConfigError(
            f"numerics.exact = true cannot be kept on this machine ({device.name}): {broken}. "
            "Set numerics.exact = false; prove then compares within a tolerance."
        )


def grid_of(spec: ParamSpec, grain: Grain, shape: ModelShape, excess: Excess) -> Grid:
    """The grid of a parameter's gradient, for as many terms as meet in it on any layout: the chunks of every microbatch
    add a product each, a lookup or a norm every token. A tied table has both.
    """
    products = grain.microbatches * max(grain.chunks, grain.parts)
    if "experts" in spec.axes:
        terms = grain.sequences * grain.parts
    elif "vocab" in spec.axes:
        terms = grain.tokens + products
    elif "head_dim" in spec.axes:
        terms = grain.tokens * shape.heads
    elif len(spec.axes) == 1:
        terms = grain.tokens
    else:
        terms = products
    return PARAMETER.of(terms, f"the gradient of {spec.name}", excess)


def make_exact(module: nn.Module, spec: UnitSpec, exact: ExactLayers) -> None:
    """Change the forward of the module's layers. Parameters of layers that are not known here are added as autograd
    gives them: the same bits for any split of the batch, not of a tensor.
    """
    linears = {layer: cast(nn.Linear, layer) for layer in module.modules() if is_plain_linear(layer)}
    for local, param in spec.params.items():
        layer = module.get_submodule(local.rpartition(".")[0])
        weight = module.get_parameter(local)
        if param.factor is not None:
            continue  # its linear computes with it
        if isinstance(layer, AdaptedLinear):
            if weight is layer.weight:
                _adapt(layer, local, spec, exact)
        elif layer in linears and weight is layer.weight:
            linear = linears[layer]
            bias_sink = None if linear.bias is None else exact.sinks.get(linear.bias)
            replace_forward(linear, exact_linear(linear, exact.sinks.get(weight), exact.cut(param), bias_sink))
        elif isinstance(layer, RMSNorm):
            replace_forward(layer, exact_norm(weight, exact.sinks.get(weight), layer.eps))
        elif layer in linears:
            assert exact.rules.cut(param.axes[0]) == "tp", "a bias of what is summed over tp is added once, not here"
        elif weight in exact.sinks:  # what is frozen and has no sum of ours is computed as it is
            _sum_into(layer, weight, exact)
    _make_parts_exact(module)


def _make_parts_exact(module: nn.Module) -> None:
    """Change what has no parameters of its own, and the head's product."""
    for layer in module.modules():
        if isinstance(layer, nn.SiLU):
            replace_forward(layer, exact_silu)
        elif isinstance(layer, FeedForward | Experts):
            replace_forward(layer, gated(layer, exact_gate_of))
        elif isinstance(layer, MixtureOfExperts):
            layer.combine = exact_combine  # type: ignore[method-assign]
    if isinstance(module, Head):
        # The loss multiplies; what enters a cut head still enters here.
        replace_forward(module.lm_head, _same)


def _sum_into(layer: nn.Module, weight: nn.Parameter, exact: ExactLayers) -> None:
    """Have the gradient of a parameter that is neither a linear's nor a norm's go to its sink."""
    sink = exact.sinks[weight]
    if is_plain_embedding(layer):
        replace_forward(layer, exact_embedding(cast(nn.Embedding, layer), sink))
    elif isinstance(layer, GroupedLinear):
        replace_forward(layer, exact_grouped_linear(layer, sink))
    elif isinstance(layer, Gate):
        sinks = {name: exact.sinks[parameter] for name, parameter in layer.named_parameters()}
        replace_forward(layer, exact_gate(layer, sinks, exact.parts))
    else:
        weight.register_post_accumulate_grad_hook(hands_to(partial(sink.grid.add, sink.into)))


def _adapt(layer: AdaptedLinear, local: str, spec: UnitSpec, exact: ExactLayers) -> None:
    path = local.removesuffix(".weight")
    a, b = f"{path}{ENDS['a']}", f"{path}{ENDS['b']}"
    params = dict(layer.named_parameters())
    sinks = exact.sinks[params["lora_A.weight"]], exact.sinks[params["lora_B.weight"]]
    cuts = exact.cut(spec.params[local]), exact.cut(spec.params[a]), exact.cut(spec.params[b])
    replace_forward(layer, exact_adapted(layer, cuts, sinks))


def build_exact_loss(
    head: nn.Module, spec: UnitSpec, exact: ExactLayers, vocab: int
) -> Callable[[Tensor, Aim, float], Tensor]:
    """The loss of the last unit's output: (output, aim, scale) to the sum over all tokens, fp64."""
    assert isinstance(head, Head)
    weight = head.get_parameter("lm_head.weight")
    cut, sink = exact.cut(spec.params["lm_head.weight"]), exact.sinks.get(weight)

    def loss(h: Tensor, aim: Aim, scale: float) -> Tensor:
        return exact_loss(h, weight, aim, scale, sink, cut, vocab)

    return loss


def _same(x: Tensor) -> Tensor:
    return x
