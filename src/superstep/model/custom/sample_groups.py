"""Groups of samples that batch norms of a user's model normalise together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from superstep.errors import ConfigError
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.meta import on_meta
from superstep.model.unit import UnitSpec
from superstep.plan.resolution.resolve import Resolved


def list_groups(specs: Iterable[UnitSpec]) -> Iterator[tuple[UnitSpec, int]]:
    """Each batch norm's number of samples in a group, with its unit."""
    for spec in specs:
        with on_meta():
            module = spec.build()
        yield from ((spec, layer.group) for layer in module.modules() if isinstance(layer, BatchNorm))


def set_groups(specs: Sequence[UnitSpec], group: int, where: str) -> tuple[UnitSpec, ...]:
    """The units with one number of samples in the group of each batch norm.

    Raises:
        ConfigError: there is no batch norm.
    """
    if not any(True for _ in list_groups(specs)):
        raise ConfigError(f"model.norm_group = {group} with {where}: no unit has a batch norm; leave it out.")
    return tuple(replace(spec, build=partial(_build_in_groups, spec.build, group)) for spec in specs)


def _build_in_groups(build: Callable[[], nn.Module], group: int) -> nn.Module:
    module = build()
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            layer.group = group
    return module


def count_together(specs: Iterable[UnitSpec]) -> int:
    """The least number of consecutive samples that contains only whole groups: 1 without batch norm."""
    return math.lcm(*(group for _, group in list_groups(specs)))


def require_whole_groups(specs: Iterable[UnitSpec], run: Resolved, where: str) -> None:
    """Refuse groups of samples that no microbatch holds whole.

    Raises:
        ConfigError: naming the first unit with one.
    """
    plan = run.plan
    for spec, group in list_groups(specs):
        at = f"{where}: unit '{spec.name}' has batch norm over groups of {group} samples, and"
        if plan.microbatch % group:
            raise ConfigError(
                f"{at} plan.microbatch = {plan.microbatch} does not hold them whole; set plan.microbatch to a multiple "
                f"of {group}, or model.norm_group to a divisor of {plan.microbatch}."
            )
        if plan.mesh.cp > 1 or plan.sequence_parallel:
            name, mend = ("cp", "1") if plan.mesh.cp > 1 else ("sequence_parallel", "false")
            raise ConfigError(f"{at} plan.{name} gives each rank a part of every sample; set plan.{name} to {mend}.")
        if run.config.data.is_masked:
            raise ConfigError(f"{at} documents are not its samples; set data.document_mask to false.")
        if run.has_documents:
            raise ConfigError(f"{at} a row of ragged samples is no sample; take another norm, such as LayerNorm.")
