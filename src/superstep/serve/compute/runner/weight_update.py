"""Update of a rank's weights: new weights are read into memory of their own, installed at once, freed and reloaded.

    read      in a thread during steps: this rank's part of every tensor, cut, cast, checked for NaN, laid out
    switch    between two steps: the parts are copied over the old ones, the laid-out products are exchanged

Not in place: damaged or wrong weights then change nothing, and no step waits for a file. It takes the memory of a
second set of weights meanwhile; a server without it sleeps first, and wakes with the new weights. Copied parameters
keep their address: views and pointers see the new values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from superstep.errors import StateError
from superstep.model.files.hf import Weights
from superstep.plan.model.hf_config import from_hf_config
from superstep.serve.compute.kv_cache import KvCache
from superstep.serve.compute.linears.fused_linears import ValueOf
from superstep.serve.compute.serving_model import ServedUnits, fill
from superstep.serve.compute.tiled_kv_cache import TiledKvCache


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """Weights that were read and are not in place.

    Attributes:
        parts: this rank's part of each parameter, by name.
        place: installs the products laid out from them.
    """

    parts: dict[str, Tensor]
    place: Callable[[], None]


class LaidOutWeights(Protocol):
    """Products laid out from the weights."""

    def beside(self, value_of: ValueOf) -> Callable[[], None]:
        """Lay out weights that are not in place; the returned function installs the products."""

    def drop(self) -> None: ...


class RankMemory:
    """The weights and KV cache of a rank.

    Args:
        served: the units.
        store: the KV cache.
        linears: the laid-out products; None where the model's own layers compute.

    Attributes:
        changes: number of updates of the weights; equal on every rank.
        has_weights: False while it sleeps without weights.
    """

    def __init__(self, served: ServedUnits, store: KvCache | TiledKvCache, linears: LaidOutWeights | None) -> None:
        self.changes = 0
        self.has_weights = True
        self._served = served
        self._store = store
        self._others: list[RankMemory] = []
        self._linears = linears
        at = {held.values.data_ptr(): name for name, held in served.params.items()}
        self._name_of = {id(p): at[p.data_ptr()] for module in served.modules for p in module.parameters()}

    @property
    def is_paged(self) -> bool:
        """Whether rows read keys directly in their pages."""
        return isinstance(self._store, TiledKvCache)

    def read(self, weights: Weights) -> PendingWeights:
        """This rank's part of some weights; those in place do not change. Thread-safe.

        Raises:
            StateError: they belong to another model, or contain NaN or infinity; names the tensor.
        """
        empty = {
            name: replace(held, values=torch.zeros_like(held.values)) for name, held in self._served.params.items()
        }
        return self._fill(replace(self._served, params=empty), weights)

    def switch(self, beside: PendingWeights) -> None:
        """Install weights, between two steps."""
        while beside.parts:  # each part is freed once it is copied
            name, part = beside.parts.popitem()
            values = self._served.params[name].values
            if not self.has_weights:
                _take(values)
            values.copy_(part)
            del part
        beside.place()
        self.changes += 1

    def sleep_with(self, other: RankMemory) -> None:
        """Free and allocate another model's KV cache together with this one. Its weights stay."""
        self._others.append(other)

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the KV cache, and the weights unless ``keeps_weights``."""
        for one in (self, *self._others):
            _give_back(one._store.keys, one._store.values)
        if not keeps_weights:
            self.has_weights = False
            _give_back(*(held.values for held in self._served.params.values()))
            if self._linears is not None:
                self._linears.drop()

    def wake(self, beside: PendingWeights | None) -> None:
        """Allocate memory again, and install weights if given; each of their parts is freed in turn."""
        if beside is not None:
            self.switch(beside)
            self.has_weights = True
        for one in (self, *self._others):
            _take(one._store.keys, one._store.values)

    @torch.no_grad()
    def _fill(self, served: ServedUnits, weights: Weights) -> PendingWeights:
        _require_shape(served, weights)
        fill(served, weights)
        parts = {name: held.values for name, held in served.params.items()}
        if self._linears is None:
            return PendingWeights(parts, lambda: None)

        def value_of(param: Tensor) -> Tensor:
            weights.progress()  # laying out takes time as well
            return parts[self._name_of[id(param)]]

        return PendingWeights(parts, self._linears.beside(value_of))


def _require_shape(served: ServedUnits, weights: Weights) -> None:
    """A config.json beside the weights must describe this model: tensors do not show all settings."""
    config = weights.path / "config.json"
    if not config.is_file():
        return
    shape, wanted = from_hf_config(config), served.run.shape
    for name in wanted.__dataclass_fields__:
        if getattr(shape, name) != getattr(wanted, name):
            raise StateError(
                f"{config}: {name} = {getattr(shape, name)}, and the model that is served has {getattr(wanted, name)}; "
                "start a server of its own for another model."
            )


def _give_back(*tensors: Tensor) -> None:
    # The storage is freed, its views stay: they are valid again after the storage is allocated.
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _take(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        tensor.zero_()
