"""rehearse: a user's units as a tensor-parallel rank would run them, on the meta device, before any is launched.

The parameters are cut and the layers changed as in the run; entering and leaving change shapes, and send nothing. So
errors such as a head that is cut in two, or code that needs the whole sequence, show in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from superstep.comm.mesh import Group
from superstep.engine.flat.layout import cut, partial_names
from superstep.engine.layers.implementation import install
from superstep.engine.parallel.noise import CutNoise
from superstep.engine.parallel.tensor import Boundaries, Boundary, splitting
from superstep.errors import ConfigError
from superstep.model.custom.inspect import UnitOutput, as_fields, build, find_drawn, run
from superstep.model.decoder import flash
from superstep.model.unit import GIVEN, Fields, UnitSpec, list_sources, takes_only_fields
from superstep.plan.mesh import Coordinate
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.parameters import has_cut_output

FIRST = Coordinate(pp=0, dp=0, cp=0, tp=0)


@dataclass(frozen=True)
class _Alone:
    """The parts of a process group that the changed layers need."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def rehearse(
    resolved: Resolved, specs: Sequence[UnitSpec], example: Tensor | Fields, between: Sequence[UnitOutput], where: str
) -> None:
    """Check that every unit runs cut, and gives the matching part of its whole output.

    Args:
        resolved: the run.
        specs: the units.
        example: of the shape and dtype of the input, or of each field.
        between: the input, and the output of each whole unit.
        where: the source of the units.

    Raises:
        ConfigError: a unit does not; the line says what would help.
    """
    plan = resolved.plan
    ways = plan.mesh.tp if plan.sequence_parallel else 1
    partial_names(specs, plan.rules, sequence_parallel=plan.sequence_parallel)
    is_output_cut = has_cut_output(resolved.outline, plan.rules)
    if is_output_cut and specs[-1].loss is not None:
        raise ConfigError(
            f"{where}: unit '{specs[-1].name}' has a loss of its own, of an output that {_how(resolved)} cuts; set the "
            "rule of that axis in plan.rules to 'none'."
        )
    fields = as_fields(example, torch.float32)
    drawn = find_drawn(specs, example, torch.float32, where)
    held = CutNoise(drawn.get, plan.mesh, FIRST, resolved.config.data.sequence_tokens)
    for number, (spec, sources) in enumerate(zip(specs, list_sources(specs), strict=True)):
        taken = [fields[of] if isinstance(of, str) else _part(between[of], ways) for of in sources]
        module = _cut_module(spec, resolved, is_first=takes_only_fields(sources), where=where)
        attended: list[int] = []

        def attend(q_BSNH: Tensor, *others: Any, lengths: list[int] = attended) -> Tensor:  # noqa: ANN401
            lengths.append(q_BSNH.shape[1])
            return flash(q_BSNH, *others)

        given = {name: {**GIVEN, "attend": attend}[name] for name in spec.takes}
        try:
            out = run(module, spec, taken, sources, given, where, held)
        except ConfigError as error:
            raise ConfigError(f"{error} So it is with {_how(resolved)}; {_mend(resolved)}.") from error
        wanted = _part(between[number + 1], ways).shape
        if number == len(specs) - 1 and is_output_cut:
            whole = between[-1].shape
            wanted = torch.Size((*whole[:-1], whole[-1] // plan.mesh.tp))
        if out.shape != wanted:
            raise ConfigError(
                f"{where}: with {_how(resolved)} unit '{spec.name}' gives {list(out.shape)}, and {list(wanted)} is its "
                f"part of what it gives whole; {_mend(resolved)}."
            )
        if ways > 1 and any(tokens < between[0].shape[1] for tokens in attended):
            raise ConfigError(
                f"{where}: with {_how(resolved)} the attention of unit '{spec.name}' sees a part of the sequence, "
                "because no layer around it is cut; set plan.sequence_parallel to false."
            )


def _cut_module(spec: UnitSpec, resolved: Resolved, *, is_first: bool, where: str) -> nn.Module:
    plan = resolved.plan
    module = build(spec, where)
    for local, param in spec.params.items():
        path, _, leaf = local.rpartition(".")
        whole = module.get_parameter(local)
        part = whole[cut(param, tuple(whole.shape), plan.mesh, FIRST, plan.rules)]
        setattr(module.get_submodule(path), leaf, nn.Parameter(part.detach().clone()))
    group = cast(Group, _Alone(plan.mesh.tp))
    around = splitting(
        module, spec, group, plan.rules, _SHAPES, sequence_parallel=plan.sequence_parallel, is_first=is_first
    )
    install(module, (), around)
    return module


def _part(passed: UnitOutput, ways: int) -> Tensor:
    shape = passed.shape if ways == 1 else (passed.shape[0], passed.shape[1] // ways, *passed.shape[2:])
    return torch.empty(shape, dtype=passed.dtype, device="meta")


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _gather_dim(x: Tensor, group: Group) -> Tensor:
    return torch.cat([x] * group.size(), 1)


def _scatter_dim(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size(), 1)[0]


_SHAPES = Boundaries(
    whole=Boundary(_same, _same, _same), split=Boundary(_gather_dim, _scatter_dim, _scatter_dim), end=_scatter_dim
)


def _how(resolved: Resolved) -> str:
    plan = resolved.plan
    return f"plan.tp = {plan.mesh.tp}" + (", plan.sequence_parallel = true" if plan.sequence_parallel else "")


def _mend(resolved: Resolved) -> str:
    if resolved.plan.sequence_parallel:
        return "set plan.sequence_parallel to false, or give the layers between which it is cut a module of their own"
    return "set plan.tp to what its heads split over, or the axis in plan.rules to 'none'"
