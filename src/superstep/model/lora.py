"""Linears with adapters, added to units from outside (LoRA, Hu 2021); ``plan.resolution.lora`` chooses the linears.

    y = W x + b + scale · B (A dropout(x))

A unit keeps its code. Where it builds a linear that gets an adapter, an ``AdaptedLinear`` replaces it, with the same
parameters under the same names and the two factors below it, under PEFT's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.files.peft_adapter import scale_of
from superstep.model.meta import on_meta
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.numerics.noise import CurrentNoise
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
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False, **like)
        self.scale = scale
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The sum, in the dtype of the factors."""
        added: Tensor = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return F.linear(x, self.weight, self.bias) + self.scale * added


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
    return tuple(_add_factors(spec, targets, lora) for spec in specs)


def _add_factors(spec: UnitSpec, targets: set[str], lora: LoraConfig) -> UnitSpec:
    own = {local: replace(param, is_frozen=True) for local, param in spec.params.items()}
    adapted = {
        local.removesuffix(".weight"): param
        for local, param in spec.params.items()
        if local.endswith(".weight") and param.name.removesuffix(".weight") in targets
    }
    if not adapted:
        return replace(spec, params=own)
    with on_meta():
        module = spec.build()
    params = dict(own)
    for path, param in adapted.items():
        a, b = _factors(param, module.get_parameter(f"{path}.weight").shape[1])
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


def _build(build: Callable[[], nn.Module], paths: Sequence[str], rank: int, scale: float, dropout: float) -> nn.Module:
    module = build()
    for path in paths:
        around, _, leaf = path.rpartition(".")
        linear = module.get_submodule(path)
        assert type(linear) is nn.Linear, "the outline lists plain linears alone"
        setattr(module.get_submodule(around), leaf, AdaptedLinear(linear, rank, scale, dropout))
    return module
