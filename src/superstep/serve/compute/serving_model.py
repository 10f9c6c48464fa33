"""The trainer's own units with weights to serve: plain model code, cut over tp and made exact from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.engine.exact.layer_settings import settings_without_gradients
from superstep.engine.exact.modules import exact_layers
from superstep.engine.flat.layout import lay_out
from superstep.engine.layer_table import keep_for_loss
from superstep.engine.layers.implementation import Implementation, install
from superstep.engine.parallel.tensor import EXACT_OVER_TP, OVER_TP, splitting
from superstep.errors import StateError
from superstep.model.axes import units
from superstep.model.decoder import Head
from superstep.model.files.hf import HfTensor, Weights, check_weights
from superstep.model.meta import on_meta
from superstep.model.mixture.expert_dispatch import DispatchContext, ExpertDispatch, LocalDispatch
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.numerics.dtypes import DTYPES
from superstep.plan.mesh import Coordinate
from superstep.plan.model.shape import ModelShape
from superstep.plan.resolution.resolve import Resolved


@dataclass(frozen=True, slots=True)
class ServedUnits:
    """The units of a rank.

    Attributes:
        run: the resolved plan.
        specs: of the units.
        modules: the units.
        params: every parameter of this rank by its global name.
        exchange: of mixtures of experts.
    """

    run: Resolved
    specs: tuple[UnitSpec, ...]
    modules: tuple[nn.Module, ...]
    params: Mapping[str, RankParameter]
    exchange: ExpertDispatch

    @property
    def head(self) -> Head:
        head = self.modules[-1]
        assert isinstance(head, Head)
        return head


@dataclass(frozen=True, slots=True)
class RankParameter:
    """A parameter of this rank.

    Attributes:
        spec: of the global parameter.
        shape: of the global tensor.
        values: this rank's part, followed by rows of zeros where its dim is padded.
        index: the part's place in the global tensor.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    values: Tensor
    index: tuple[slice, ...]


def serving_shape(shape: ModelShape) -> ModelShape:
    """The same model without expert capacity: which token a limit drops would depend on other requests."""
    if shape.moe is None or shape.moe.router == "dropless":
        return shape
    return replace(shape, moe=replace(shape.moe, capacity_factor=float(shape.moe.experts)))


def build(run: Resolved, rank: int, tp: Group | None, device: Device) -> ServedUnits:
    """The units with memory for their weights; ``fill`` reads the weights."""
    specs = units(serving_shape(run.shape))
    dtype = DTYPES[run.config.numerics.compute]
    at = Coordinate(pp=0, dp=0, cp=0, tp=rank)
    params: dict[str, RankParameter] = {}
    slots = lay_out(specs, run.plan.mesh, at, run.plan.rules, sequence_parallel=False, padding=run.plan.padding)
    for buffers in slots:
        for slot in (slot for buffer in buffers for slot in buffer.slots):
            values = torch.zeros(slot.local_shape, dtype=dtype, device=device.torch)
            params[slot.spec.name] = RankParameter(slot.spec, slot.shape, values, slot.index)
    shared = {name: nn.Parameter(held.values, requires_grad=False) for name, held in params.items()}
    modules = tuple(_unit(spec, shared, run, tp, is_first=number == 0) for number, spec in enumerate(specs))
    return ServedUnits(
        run, specs, modules, params, LocalDispatch(DispatchContext(sequences=(0,)), parts=1 if run.plan.grain else None)
    )


def _unit(
    spec: UnitSpec, shared: Mapping[str, nn.Parameter], run: Resolved, tp: Group | None, *, is_first: bool
) -> nn.Module:
    with on_meta():
        module = spec.build()
    for local, param in spec.params.items():
        path, _, leaf = local.rpartition(".")
        setattr(module.get_submodule(path), leaf, shared[param.name])
    grain, rules = run.plan.grain, run.plan.rules
    computing: tuple[Implementation, ...] = ()
    if grain is not None:
        exact = settings_without_gradients(module, grain, rules, tp)
        computing = keep_for_loss(module, spec) + exact_layers(spec, exact)
    around: tuple[Implementation, ...] = ()
    if tp is not None:
        seams = OVER_TP if grain is None else EXACT_OVER_TP
        around = splitting(module, spec, tp, rules, seams, sequence_parallel=False, is_first=is_first)
    install(module, computing, around)
    return module.eval()


@torch.no_grad()
def fill(served: ServedUnits, weights: Weights) -> None:
    """Read this rank's part of every tensor from a folder or a file.

    Raises:
        StateError: the tensors belong to another model, and nothing has been changed; or one contains NaN or infinity
            in the served dtype.
    """
    check_weights(weights, {name: shape for held in served.params.values() for name, shape in _shapes(held)})
    for held in served.params.values():
        part = held.values[tuple(slice(0, s.stop - s.start) for s in held.index)]
        if held.spec.stack:
            for into, name in zip(part, held.spec.stack[held.index[0]], strict=True):
                _copy_finite(into, name, weights, held.index[1:])
        else:
            _copy_finite(part, held.spec.name, weights, held.index)


def _copy_finite(into: Tensor, name: str, weights: Weights, index: tuple[slice, ...]) -> None:
    into.copy_(_read(weights[name], index))
    if not torch.isfinite(into).all():
        dtype = str(into.dtype).removeprefix("torch.")
        raise StateError(f"{weights.path}: {name} holds values that are no finite numbers in {dtype}.")


def _shapes(held: RankParameter) -> list[tuple[str, Sequence[int]]]:
    return [(name, held.shape[1:]) for name in held.spec.stack] or [(held.spec.name, held.shape)]


def _read(stored: HfTensor, index: tuple[slice, ...]) -> Tensor:
    return stored[index] if index else stored[:]
