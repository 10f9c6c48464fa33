"""Inspection of a list of units without memory: their outline for the plan, the shapes between them, and parts that
cannot be trained in parallel.

Everything here runs on the meta device, except a probe of small units. Each error is one line that names the source of
the units, the unit, and the parameter or module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from superstep.errors import ConfigError, did_you_mean
from superstep.model.by_place.batch_norm import STATISTICS, is_statistic
from superstep.model.by_place.dropout import compute_by_place, run_with_noise
from superstep.model.custom.batch_dependence import check_rows
from superstep.model.custom.check_edges import check_inputs, check_outputs, require_fields
from superstep.model.custom.check_phases import check_phase_inputs, check_phases
from superstep.model.custom.is_plain import (
    is_plain_convolution,
    is_plain_embedding,
    is_plain_linear,
    is_sparse_table,
)
from superstep.model.custom.unsupported_modules import RandomOperations, check_hooks, check_modules, depends_on
from superstep.model.meta import on_meta
from superstep.model.unit import (
    GIVEN,
    Fields,
    ParamSpec,
    Source,
    UnitSpec,
    list_losses,
    list_phases,
    list_sources,
    name_fields,
    start_graph,
)
from superstep.numerics.noise import FindHeld, HeldElements, SamplePlace, hold_whole
from superstep.plan.model.outline import Layer, Outline, Parameter, Unit


@dataclass(frozen=True, slots=True)
class UnitOutput:
    """A tensor that a unit returns, or the input of the first."""

    shape: torch.Size
    dtype: torch.dtype


def outline_of(specs: Sequence[UnitSpec], where: str) -> Outline:
    """The outline of a list of units, for a plan.

    Args:
        specs: the units.
        where: their source for errors, such as a file.

    Raises:
        ConfigError: the list, a unit, or its table of parameters is invalid.
    """
    if not specs:
        raise ConfigError(f"{where}: there are no units; list at least one.")
    units: list[Unit] = []
    known: dict[str, Parameter] = {}
    for spec in specs:
        if not isinstance(spec, UnitSpec):
            raise ConfigError(f"{where}: {spec!r} is no UnitSpec; list one UnitSpec for each unit.")
        if any(unit.name == spec.name for unit in units):
            raise ConfigError(f"{where}: two units have the name '{spec.name}'; give each its own.")
        check_inputs(spec, specs, units, where)
        if spec.decoder is not None and spec.decoder.moe is not None:
            raise ConfigError(
                f"{where}: the decoder behind encoders has a mixture of {spec.decoder.moe.experts} experts, and tokens "
                "are sent to experts in decoders of text alone; give it a dense feed-forward, moe=None."
            )
        for name in spec.takes:
            if name not in GIVEN:
                raise ConfigError(f"{where}: unit '{spec.name}' takes '{name}'{did_you_mean(name, GIVEN)}")
        module = build(spec, where)
        at = f"{where}: unit '{spec.name}'"
        check_modules(module, at)
        check_hooks(module, at)
        parameters = tuple(_parameters(module, spec, where))
        for parameter in parameters:
            before = known.setdefault(parameter.name, parameter)
            if (before.axes, before.dims) != (parameter.axes, parameter.dims):
                raise ConfigError(
                    f"{where}: unit '{spec.name}' has '{parameter.name}' as {list(parameter.dims)} with axes "
                    f"{parameter.axes}, another unit as {list(before.dims)} with {before.axes}; units that name the "
                    "same tensor share it, so give it one shape and the same axes, or another name."
                )
        inputs = tuple(spec.phase_inputs.items())
        units.append(Unit(spec.name, parameters, spec.inputs, spec.phase, spec.is_encoder, phase_inputs=inputs))
    check_phases(specs, where)
    decoder = next((spec.decoder for spec in specs if spec.decoder is not None), None)
    outline = Outline(tuple(units), list_phases(specs), list_losses(specs), decoder)
    check_outputs(outline, where)
    check_phase_inputs(specs, outline, where)
    return outline


def build(spec: UnitSpec, where: str) -> nn.Module:
    """A unit's module on the meta device.

    Raises:
        ConfigError: it cannot be built.
    """
    try:
        with on_meta():
            module = spec.build()
    except Exception as error:
        raise ConfigError(f"{where}: unit '{spec.name}' cannot be built: {_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{where}: unit '{spec.name}' builds {type(module).__name__}, no torch.nn.Module.")
    return module


def _parameters(module: nn.Module, spec: UnitSpec, where: str) -> Iterator[Parameter]:
    named = dict(module.named_parameters())
    twice = [local for local, _ in module.named_parameters(remove_duplicate=False) if local not in named]
    if twice:
        raise ConfigError(
            f"{where}: unit '{spec.name}' has one parameter in two places, the second '{twice[0]}'; use one module "
            "twice, or make two units that name the same tensor."
        )
    if missing := [local for local in named if local not in spec.params]:
        raise ConfigError(
            f"{where}: unit '{spec.name}' has a parameter '{missing[0]}' that its table lacks; add it to params."
        )
    for local, param in spec.params.items():
        if local not in named:
            raise ConfigError(
                f"{where}: the table of unit '{spec.name}' has '{local}', which is no parameter of its module"
                + (did_you_mean(local, named) if named else "; take it out.")
            )
        if not isinstance(param, ParamSpec):
            raise ConfigError(f"{where}: unit '{spec.name}', '{local}': {param!r} is no ParamSpec; make it one.")
        dims = tuple(named[local].shape)
        if len(param.axes) != len(dims):
            raise ConfigError(
                f"{where}: unit '{spec.name}', '{local}': {len(param.axes)} axes {param.axes} for {len(dims)} dims "
                f"{list(dims)}; give one for each dim, None where it has no name."
            )
        if 0 in dims:
            raise ConfigError(f"{where}: unit '{spec.name}', '{local}' has no elements: {list(dims)}; take it out.")
        if not named[local].is_floating_point():
            raise ConfigError(f"{where}: unit '{spec.name}', '{local}' is {named[local].dtype}; make it a buffer.")
        if not named[local].requires_grad:
            raise ConfigError(f"{where}: unit '{spec.name}', '{local}' is not trained; make it a buffer.")
        _check_bias(local, spec, where)
        layer = module.get_submodule(local.rpartition(".")[0])
        is_plain = is_plain_linear(layer) or is_plain_embedding(layer) or is_plain_convolution(layer)
        if param.is_statistic != is_statistic(module, local):
            raise ConfigError(
                f"{where}: unit '{spec.name}', '{local}' has is_statistic = {param.is_statistic}; set it to "
                f"{not param.is_statistic}: {' and '.join(STATISTICS)} of a batch norm are statistics, nothing else."
            )
        if param.is_sparse != is_sparse_table(module, local):
            raise ConfigError(
                f"{where}: unit '{spec.name}', '{local}' has is_sparse = {param.is_sparse}; set it to "
                f"{not param.is_sparse}: tables of nn.Embedding(..., sparse=True) are sparse, nothing else."
            )
        yield Parameter(
            name=param.name,
            axes=param.axes,
            dims=dims,
            layer=_layer(layer),
            is_plain=is_plain,
            groups=getattr(layer, "groups", 1) if is_plain else 1,
            is_statistic=param.is_statistic,
            is_sparse=param.is_sparse,
            is_frozen=param.is_frozen,
            sections=param.sections,
        )


def _check_bias(local: str, spec: UnitSpec, where: str) -> None:
    path, _, leaf = local.rpartition(".")
    weight = spec.params.get(f"{path}.weight" if path else "weight")
    axes = spec.params[local].axes
    if leaf == "bias" and weight is not None and len(weight.axes) >= 2 and axes[0] != weight.axes[0]:
        raise ConfigError(
            f"{where}: unit '{spec.name}', '{local}' has the axis {axes[0]!r}, and its weight has {weight.axes[0]!r} "
            "over the same dim; name them alike."
        )


def _layer(layer: nn.Module) -> Layer:
    if isinstance(layer, nn.Linear):
        return "linear"
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "convolution"
    return "embedding" if isinstance(layer, nn.Embedding) else "other"


def pass_through(
    specs: Sequence[UnitSpec],
    example: Tensor | Fields,
    compute: torch.dtype,
    where: str,
    given: Mapping[str, Any] = GIVEN,
    held: FindHeld = hold_whole,
) -> tuple[UnitOutput, ...]:
    """The input of the first unit, and the output of each, for an input like ``example``.

    Args:
        specs: the units.
        example: of the shape and dtype of the input, or of each field, on any device.
        compute: the dtype of parameters and activations.
        where: the source of the units.
        given: keyword arguments of units.
        held: called with each tensor of random numbers.

    Raises:
        ConfigError: a unit does not run, returns no tensor, or changes its input or buffers.
    """
    fields = as_fields(example, compute)
    outputs = [next(iter(fields.values()))]
    for spec, taken, here, out in _run_each(specs, fields, compute, where, given, held):
        check_rows(spec, taken, here, where)
        outputs.append(out)
    return tuple(UnitOutput(x.shape, x.dtype) for x in outputs)


def count_multiplications(
    specs: Sequence[UnitSpec], example: Tensor | Fields, where: str, given: Mapping[str, Any] = GIVEN
) -> tuple[int, ...]:
    """The multiplications of products and attention in each unit's forward pass; else as ``pass_through``."""
    counts, before = [], 0
    with FlopCounterMode(display=False) as counter:
        for _ in _run_each(specs, as_fields(example, torch.float32), torch.float32, where, given, hold_whole):
            counts.append((counter.get_total_flops() - before) // 2)
            before = counter.get_total_flops()
    return tuple(counts)


def _run_each(
    specs: Sequence[UnitSpec],
    fields: Fields,
    compute: torch.dtype,
    where: str,
    given: Mapping[str, Any],
    held: FindHeld,
) -> Iterator[tuple[UnitSpec, list[Tensor], dict[str, Any], Tensor]]:
    """Each unit in turn, with its arguments, its keyword arguments and its output."""
    require_fields(specs, fields, where)
    values: list[Tensor] = []
    for spec, sources in zip(specs, list_sources(specs), strict=True):
        module = build(spec, where).to(compute)
        here = {name: given[name] for name in spec.takes}
        taken = [fields[of] if isinstance(of, str) else values[of - 1] for of in sources]
        values.append(run(module, spec, taken, sources, here, where, held))
        yield spec, taken, here, values[-1]


def as_fields(example: Tensor | Fields, compute: torch.dtype) -> dict[str, Tensor]:
    """Fields like those of an example, on the meta device; floating ones in the compute dtype."""
    return {
        name: torch.empty(x.shape, dtype=compute if x.is_floating_point() else x.dtype, device="meta")
        for name, x in name_fields(example).items()
    }


def find_drawn(
    specs: Sequence[UnitSpec], example: Tensor | Fields, compute: torch.dtype, where: str
) -> dict[str, torch.Size]:
    """The shape of each tensor of random numbers of one sample, by its name; else as ``pass_through``, which also
    probes rows of numbers.
    """
    drawn: dict[str, torch.Size] = {}

    def note(name: str, shape: torch.Size, device: torch.device) -> HeldElements:
        drawn[name] = shape
        return hold_whole(name, shape, device)

    for _ in _run_each(specs, as_fields(example, compute), compute, where, GIVEN, note):
        pass
    return drawn


def run(
    module: nn.Module,
    spec: UnitSpec,
    taken: Sequence[Tensor],
    sources: Sequence[Source],
    given: Mapping[str, object],
    where: str,
    held: FindHeld = hold_whole,
) -> Tensor:
    """A unit's output on the meta device; raises as ``pass_through`` does."""
    buffers = dict(module.named_buffers())
    before = {name: buffer._version for name, buffer in buffers.items()}
    # No leaves, so that a change in place is detected here.
    inputs = [x.clone() for x in start_graph(taken, sources, has_parameters=bool(spec.params))]
    versions, random = [x._version for x in inputs], RandomOperations()
    current, place = compute_by_place(module), SamplePlace(is_training=True)
    try:
        with torch.enable_grad(), random:
            out = run_with_noise(module, current, inputs, given, place, f"{spec.name}.", held)
    except Exception as error:
        shapes = " and ".join(str(list(x.shape)) for x in inputs)
        raise ConfigError(f"{where}: unit '{spec.name}' does not run on an input {shapes}: {_line(error)}") from error
    if not isinstance(out, Tensor):
        raise ConfigError(f"{where}: unit '{spec.name}' gives {type(out).__name__}; let it return one tensor.")
    if [x._version for x in inputs] != versions:
        raise ConfigError(f"{where}: unit '{spec.name}' changes its input in place; let it make a new tensor.")
    _check_randomness(random, spec, where)
    lost = [n for n, x in enumerate(inputs) if x.requires_grad and not depends_on(out, x)]
    if not out.requires_grad or lost:
        of = f"its input '{spec.inputs[lost[0]]}'" if lost and spec.inputs else "its input"
        what = "no gradient" if not out.requires_grad else f"no gradient of {of}"
        raise ConfigError(
            f"{where}: unit '{spec.name}' gives an output that carries {what}, so that nothing before it would learn; "
            "leave out detach(), no_grad(), or the whole numbers in between."
        )
    changed = [name for name, buffer in buffers.items() if buffer._version != before[name]]
    if changed:
        raise ConfigError(
            f"{where}: unit '{spec.name}' changes its buffer '{changed[0]}' as it runs, which ranks would do each for "
            "themselves; keep no running state."
        )
    return out.detach()


def _check_randomness(random: RandomOperations, spec: UnitSpec, where: str) -> None:
    if random.names:
        raise ConfigError(
            f"{where}: unit '{spec.name}' draws random numbers as it runs ({random.names[0]}), so that no two layouts "
            "would compute the same; drop with a torch.nn.Dropout module, draw from the argument noise "
            "(takes = ('noise',)), or leave it out."
        )


def _line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return first if first.endswith((".", "!", "?")) else f"{first}."
