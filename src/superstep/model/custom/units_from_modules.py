"""as_units: any list of modules as units.

    as_units([nn.Sequential(stem), block, block, nn.Sequential(pool, classifier)])

Each module becomes a unit with its own initial values. Such units run under data, ZeRO and pipeline parallelism, and
with ``axes`` under tensor parallelism. Build them alike on every rank: from the same seed, or from the same file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from superstep.errors import ConfigError
from superstep.model.by_place.batch_norm import is_statistic
from superstep.model.custom.is_plain import is_sparse_table
from superstep.model.custom.unsupported_modules import check_hooks, check_modules
from superstep.model.unit import Loss, ParamSpec, UnitSpec, WeightedLosses


def as_units(
    modules: Sequence[nn.Module],
    *,
    inputs: Mapping[int, Sequence[int | str]] | None = None,
    takes: Mapping[int, Sequence[str]] | None = None,
    loss: Loss | Mapping[str, Loss | Mapping[str, Loss]] | None = None,
    phases: Mapping[str, Sequence[int]] | None = None,
    phase_inputs: Mapping[str, Sequence[int | str]] | None = None,
    axes: Mapping[str, Sequence[str | None]] | None = None,
) -> tuple[UnitSpec, ...]:
    """The units ``0``, ``1``, ...: parameter ``weight`` of the first is ``0.weight``, as in ``nn.Sequential``.

    Args:
        modules: each takes one tensor and returns one; the first takes the input, the last returns the input of the
            loss. A parameter that several modules have is shared by their units.
        inputs: what some modules take, by their number, instead of the output of the module before: outputs of modules
            before them, by number, and fields of the batch, by name.
        takes: keyword arguments that the forward of some modules gets, by their number: ``attend``, ``noise``, ...
        loss: the last output and the targets to the sum of the loss over targets; None means the cross entropy of
            logits [B, C] and class numbers [B]. Several by name are summed, with the weights of
            ``phases.loss_weights``. Of a step of several phases, the loss or losses of each phase by its name.
        phases: the modules that each phase trains, by their number; None for a step of one.
        phase_inputs: what the last module takes in some phases instead, by their names. Modules that do not lead to it
            are not computed there.
        axes: of some parameters by their names, such as ``0.weight``: axes of the first dims, which a plan's rules may
            cut over tp; a dim without one is whole.

    Raises:
        ConfigError: a module cannot be trained in parallel.
    """
    names: dict[int, str] = {}
    phase_of = {str(number): phase for phase, numbers in (phases or {}).items() for number in numbers}
    units, named = [], dict(axes or {})
    for number, module in enumerate(modules):
        # Detects here what a copy would lose or could not take.
        check_modules(module, f"unit '{number}'")
        check_hooks(module, f"unit '{number}'")
        params = {
            local: ParamSpec(
                name=names.setdefault(id(param), f"{number}.{local}"),
                axes=_name_dims(param, named.pop(f"{number}.{local}", ())),
                std=None,
                values=param.detach(),
                is_statistic=is_statistic(module, local),
                is_sparse=is_sparse_table(module, local),
            )
            for local, param in module.named_parameters()
        }
        build = partial(_build_copy, module)
        is_last = number == len(modules) - 1
        taken = tuple(map(str, (inputs or {}).get(number, ())))
        phase = phase_of.pop(str(number), "")
        given = tuple((takes or {}).get(number, ()))
        unit = UnitSpec(name=str(number), build=build, params=params, inputs=taken, takes=given, phase=phase)
        units.append(_with_loss(unit, loss, phase_inputs or {}, has_phases=phases is not None) if is_last else unit)
    for name, dims in named.items():
        raise ConfigError(f"axes names '{name}' {tuple(dims)}, which is no parameter of the modules; leave it out.")
    for unknown, phase in phase_of.items():
        raise ConfigError(f"phase '{phase}' trains module {unknown}, and there are {len(modules)} modules from 0 on.")
    return tuple(units)


def _name_dims(param: Tensor, first: Sequence[str | None]) -> tuple[str | None, ...]:
    return (*first, *(None,) * (param.ndim - len(first)))


def _with_loss(
    unit: UnitSpec,
    loss: Loss | Mapping[str, Loss | Mapping[str, Loss]] | None,
    phase_inputs: Mapping[str, Sequence[int | str]],
    *,
    has_phases: bool,
) -> UnitSpec:
    if isinstance(loss, Mapping) and has_phases:
        taken = {phase: tuple(map(str, each)) for phase, each in phase_inputs.items()}
        return replace(unit, losses={phase: _as_one(each) for phase, each in loss.items()}, phase_inputs=taken)
    return replace(unit, loss=None if loss is None else _as_one(loss))  # type: ignore[arg-type]


def _as_one(loss: Loss | Mapping[str, Loss]) -> Loss:
    return WeightedLosses(loss) if isinstance(loss, Mapping) else loss


def _build_copy(module: nn.Module) -> nn.Module:
    """A copy on the device of the surrounding ``with torch.device(...)``; on the meta device without its values."""
    device = torch.empty(0).device
    if device.type != "meta":
        return copy.deepcopy(module).to(device)
    # Deep copies without memory for tensors.
    bare = {id(tensor): _bare(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo=dict(bare))


def _bare(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
