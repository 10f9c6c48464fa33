"""Linears with adapters, added to units from outside (LoRA, Hu 2021); ``plan.resolution.lora`` chooses the linears.

    y = W x + b + scale · B (A dropout(x))

A unit keeps its code. Where it builds a linear that gets an adapter, an ``AdaptedLinear`` replaces it, with the same
parameters under the same names and the two factors below it, under PEFT's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from superstep.model.files.peft_adapter import scale_of
from superstep.model.meta import on_meta
from superstep.model.packed_linear import BuildPacked, PackedLinear, multiply, pack_specs, weight_of
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.numerics.noise import CurrentNoise
from superstep.plan.block_weights import BlockFormat
from superstep.plan.config import LoraConfig
from superstep.plan.model.outline import Outline
from superstep.plan.resolution.lora import ENDS, factor_names, targets_of

Mask = Callable[[Tensor], Tensor]
"""Dropout with numbers that it draws again at each call."""


class AdaptedLinear(nn.Linear):
    """A linear with an adapter.

    Args:
        linear: that it replaces; its parameters are reused.
        rank: of the factors.
        scale: of the factors' product.
        dropout: the share of A's inputs that training drops.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, parameter in linear._parameters.items():
            self.register_parameter(name, parameter)
        self.block_format, self.place = getattr(linear, "block_format", None), None  # of a packed linear
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype if self.block_format is None else None}
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False, **like)
        self.scale = scale
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The sum, in the dtype of the factors."""
        added: Tensor = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return multiply(x, weight_of(self), self.bias) + self.scale * added


DROPOUT = "lora_dropout"
"""The path of an adapter's dropout in its linear, as in PEFT."""


def find_mask(path: str, layer: AdaptedLinear, x: Tensor, current: CurrentNoise) -> Mask | None:
    """The dropout of an adapted linear's input in the forward that runs now; None where nothing is dropped."""
    if current.noise is None or not isinstance(layer.lora_dropout, nn.Dropout):
        return None
    return current.noise.mask(f"{path}.{DROPOUT}", x, layer.lora_dropout.p)


def adapt(specs: Sequence[UnitSpec], outline: Outline, lora: LoraConfig) -> tuple[UnitSpec, ...]:
    """The units with adapters. Their own parameters are frozen.

    Args:
        specs: the model's own.
        outline: of them, with adapters or without.
        lora: the adapter's settings.
    """
    targets = set(targets_of(outline, lora))
    packed = {p.name: p.dims for unit in outline.units for p in unit.parameters if p.block_format}
    frozen = (_freeze(spec, packed, lora.base) for spec in specs)
    return tuple(_add_factors(spec, targets, lora) for spec in frozen)


def _freeze(spec: UnitSpec, packed: Mapping[str, tuple[int, ...]], block_format: BlockFormat | None) -> UnitSpec:
    """The unit with its parameters frozen, and some of its linears packed in blocks.

    Args:
        spec: of the unit.
        packed: the dims of matrices to pack, by name.
        block_format: of their blocks.
    """
    own = {local: replace(param, is_frozen=True) for local, param in spec.params.items()}
    shapes = {local.removesuffix(".weight"): packed[p.name] for local, p in own.items() if p.name in packed}
    if block_format is None or not shapes:
        return replace(spec, params=own)
    build = BuildPacked(spec.build, tuple(shapes), block_format)
    return replace(spec, build=build, params=pack_specs(own, shapes, block_format))


def _add_factors(spec: UnitSpec, targets: set[str], lora: LoraConfig) -> UnitSpec:
    params = dict(spec.params)
    adapted = {
        local.removesuffix(".weight"): param
        for local, param in spec.params.items()
        if local.endswith(".weight") and param.name.removesuffix(".weight") in targets
    }
    if not adapted:
        return spec
    with on_meta():
        module = spec.build()
    for path, param in adapted.items():
        a, b = _factors(param, _linear_at(module, path).in_features)
        params |= {f"{path}{ENDS['a']}": a, f"{path}{ENDS['b']}": b}
    scale = scale_of(lora.alpha, lora.rank, is_stabilized=False)
    build = partial(_build, spec.build, tuple(adapted), lora.rank, scale, lora.dropout)
    return replace(spec, build=build, params=params)


def _factors(param: ParamSpec, inputs: int) -> tuple[ParamSpec, ParamSpec]:
    """A starts as PEFT's does, kaiming-uniform with a = sqrt(5), which is within 1 / sqrt(inputs); B with zeros."""
    names, (out_axis, in_axis) = factor_names(param.name.removesuffix(".weight")), param.axes
    return (
        ParamSpec(name=names["a"], axes=(None, in_axis), std=None, bound=1 / math.sqrt(inputs), factor="a"),
        ParamSpec(name=names["b"], axes=(out_axis, None), std=0.0, factor="b", sections=param.sections),
    )


def _linear_at(module: nn.Module, path: str) -> nn.Linear:
    linear = module.get_submodule(path)
    assert type(linear) in (nn.Linear, PackedLinear), "the outline lists plain linears alone"
    assert isinstance(linear, nn.Linear)
    return linear


def _build(build: Callable[[], nn.Module], paths: Sequence[str], rank: int, scale: float, dropout: float) -> nn.Module:
    module = build()
    for path in paths:
        around, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(around), leaf, AdaptedLinear(_linear_at(module, path), rank, scale, dropout))
    return module
