"""Exact mode, applied to a plain module from outside: its layers' sums become those of ``exact_linear``.

A layer gives whole results on every tensor-parallel rank, so that entering and leaving a region with split heads or ffn
(see ``tensor_parallel``) sums nothing: with sequence parallelism they gather and cut, otherwise they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from superstep.engine.exact.by_weight import BY_WEIGHT, exact_shared_key, is_shared_key
from superstep.engine.exact.delta import exact_delta_layers
from superstep.engine.exact.experts import exact_combine, exact_gate
from superstep.engine.exact.layer_settings import ExactLayers
from superstep.engine.exact.linear import exact_embedding, exact_linear, is_packed
from superstep.engine.exact.lora import exact_adapted
from superstep.engine.exact.norm import NormSettings, exact_norm
from superstep.engine.exact.position_bias import exact_position_bias
from superstep.engine.exact.swiglu import exact_gate_of, exact_gelu_tanh, exact_silu
from superstep.engine.layers.fused import has_silu, make_gated
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.model.custom.is_plain import is_plain_embedding, is_plain_linear
from superstep.model.lora import AdaptedLinear
from superstep.model.moe import Gate, MixtureOfExperts
from superstep.model.norm import RMSNorm
from superstep.model.position_bias import LearntBias
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.numerics.noise import CurrentNoise
from superstep.plan.resolution.lora import ENDS


@dataclass(frozen=True, slots=True)
class _LayerBuilder:
    """Makes the implementations of one unit's layers, by their path in the unit."""

    spec: UnitSpec
    exact: ExactLayers
    noise: CurrentNoise = field(default_factory=CurrentNoise)

    def linear(self, path: str, layer: nn.Linear, inner: Forward) -> Forward:
        own, param, sinks = dict(layer.named_parameters()), self._param(path), self.exact.sinks
        is_cut = self.exact.rules.cut(param.axes[0]) == "tp"
        assert "bias" not in own or is_cut, "a bias of what is summed over tp is added once, not here"
        bias_sink = sinks.get(own["bias"]) if "bias" in own else None
        return exact_linear(layer, sinks.get(own["weight"]), self.exact.cut(param), bias_sink)

    def make_adapted(self, path: str, layer: AdaptedLinear, inner: Forward) -> Forward:
        a, b = (self.exact.cut(self.spec.params[f"{path}{end}"]) for end in (ENDS["a"], ENDS["b"]))
        own = dict(layer.named_parameters())
        to = self.exact.sinks[own["lora_A.weight"]], self.exact.sinks[own["lora_B.weight"]]
        return exact_adapted(path, layer, (self.exact.cut(self._param(path)), a, b), to, self.noise)

    def norm(self, path: str, layer: RMSNorm, inner: Forward) -> Forward:
        is_cut = self.exact.rules.cut(self._param(path).axes[0]) == "tp"
        settings = NormSettings(layer.eps, layer.offset, is_cut=is_cut, group=self.exact.group if is_cut else None)
        return exact_norm(layer.weight, self.exact.sinks.get(layer.weight), settings)

    def position_bias(self, path: str, layer: LearntBias, inner: Forward) -> Forward:
        return exact_position_bias(layer, self.exact.sinks.get(layer.weight))

    def embedding(self, path: str, layer: nn.Embedding, inner: Forward) -> Forward:
        return exact_embedding(layer, self.exact.sinks[layer.get_parameter("weight")])

    def router(self, path: str, layer: Gate, inner: Forward) -> Forward:
        own = {name: self.exact.sinks[parameter] for name, parameter in layer.named_parameters()}
        if layer.e_score_correction_bias is not None:  # its gradient is no sum of the layer's
            self.exact.add_on_grid(layer.e_score_correction_bias)
        return exact_gate(layer, own, self.exact.parts)

    def by_weight(self, make: Callable[[Any, GradientSink], Forward]) -> Callable[[str, Any, Forward], Forward]:
        """Of a layer with a weight alone, by the sink of that."""
        return lambda path, layer, inner: make(layer, self.exact.sinks[layer.weight])

    def experts(self, path: str, layer: MixtureOfExperts, inner: Forward) -> Forward:
        layer.combine = exact_combine  # type: ignore[method-assign]
        return inner

    def share_key(self, path: str, layer: nn.Module, inner: Forward) -> Forward:
        return exact_shared_key(layer, self.exact.group)

    def unknown(self, path: str, layer: nn.Module, inner: Forward) -> Forward:
        self.exact.add_all_on_grid(layer)
        return inner

    def _param(self, path: str) -> ParamSpec:
        return self.spec.params[f"{path}.weight" if path else "weight"]


def exact_layers(spec: UnitSpec, exact: ExactLayers, noise: CurrentNoise | None = None) -> tuple[Implementation, ...]:
    """Implementations with a fixed order of sums. Unknown layers use autograd's gradients: the same bits for any split
    of the batch, but not of a tensor. ``noise`` is that of the unit's forward.
    """
    build = _LayerBuilder(spec, exact, noise or CurrentNoise())

    def is_trained(*kinds: type[nn.Module]) -> Callable[[nn.Module], bool]:
        return lambda layer: isinstance(layer, kinds) and exact.trains(layer)

    def any_of(*kinds: type[nn.Module]) -> Callable[[nn.Module], bool]:
        return lambda layer: isinstance(layer, kinds)

    return (
        _row("exact sums", is_plain_linear, build.linear),
        _row("exact sums", is_packed, build.linear),
        _row("exact sums of linear and factors", any_of(AdaptedLinear), build.make_adapted, is_whole=True),
        _row("exact sums", any_of(RMSNorm), build.norm),
        _row("exact sums", any_of(LearntBias), build.position_bias),
        _row("exact sums", lambda layer: is_plain_embedding(layer) and exact.trains(layer), build.embedding),
        _row("exact sums", is_trained(Gate), build.router),
        *(_row("exact sums", is_trained(kind), build.by_weight(make)) for kind, make in BY_WEIGHT.items()),
        _row("exact sum over heads", is_shared_key, build.share_key),
        _row("exact gate", any_of(nn.SiLU), lambda path, layer, inner: exact_silu),
        _row("exact gate", any_of(nn.GELU), lambda path, layer, inner: exact_gelu_tanh),
        _row("exact gate", has_silu, lambda path, layer, inner: make_gated(layer, exact_gate_of)),
        _row("exact sum over experts", any_of(MixtureOfExperts), build.experts),
        *exact_delta_layers(exact.sinks),
        _row("autograd's gradient, added on the grid", exact.trains, build.unknown),
    )


def _row(
    name: str,
    applies: Callable[[nn.Module], bool],
    build: Callable[[str, Any, Forward], Forward],
    *,
    is_whole: bool = False,
) -> Implementation:
    return Implementation(name, "numerics.exact", lambda path, layer: applies(layer), build, is_whole)
