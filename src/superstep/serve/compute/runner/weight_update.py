"""A rank's memory for weights and keys: other weights are read beside, put into place at once, given back and taken.

    read      in a thread, while steps run: this rank's part of every tensor, cut, cast, seen to be finite, laid out
    switch    between two steps: the parts are copied over the old ones, the laid-out products replace theirs

Beside, and not in place: what is found to be damaged, or of another model, has touched nothing by then, and nobody
waits for a file to be read. It costs the memory of a second set of weights for as long; who has none to spare sleeps,
and wakes with the new ones. What is copied over stays where it is: views of it, and whatever holds its address, see the
new values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from superstep.errors import StateError
from superstep.model.hf import Weights
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
        place: puts the products laid out from them into place.
    """

    parts: dict[str, Tensor]
    place: Callable[[], None]


class LaidOutWeights(Protocol):
    """Products that were laid out from the weights."""

    def beside(self, value_of: ValueOf) -> Callable[[], None]:
        """Lay out weights that are not in place; what this gives puts the products into place."""

    def drop(self) -> None:
        """Give their memory back."""


class RankMemory:
    """The weights and keys of a rank.

    Args:
        served: the units.
        store: the keys.
        linears: the products that were laid out; None where the model's own layers compute.

    Attributes:
        changes: of weights so far: the same number on every rank, or they are torn.
        has_weights: whether they are there; they are not while it sleeps without them.
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
        """Whether every row reads its keys in their pages."""
        return isinstance(self._store, TiledKvCache)

    def read(self, weights: Weights) -> PendingWeights:
        """This rank's part of some weights; those in place are as they were. Any thread may call it.

        Raises:
            StateError: they are another model's, or hold what is no number; names the tensor.
        """
        empty = {
            name: replace(held, values=torch.zeros_like(held.values)) for name, held in self._served.params.items()
        }
        return self._fill(replace(self._served, params=empty), weights)

    def switch(self, beside: PendingWeights) -> None:
        """Put weights into place. To be called between two steps."""
        while beside.parts:  # each is let go of as soon as it is copied
            name, part = beside.parts.popitem()
            values = self._served.params[name].values
            if not self.has_weights:
                _take(values)
            values.copy_(part)
            del part
        beside.place()
        self.changes += 1

    def sleep_with(self, other: RankMemory) -> None:
        """Let the keys of another model, in pages of the same numbers, go and come with these. Its weights stay."""
        self._others.append(other)

    def sleep(self, *, keeps_weights: bool) -> None:
        """Give memory back: that of the keys, and of the weights where they are not kept."""
        for one in (self, *self._others):
            _give_back(one._store.keys, one._store.values)
        if not keeps_weights:
            self.has_weights = False
            _give_back(*(held.values for held in self._served.params.values()))
            if self._linears is not None:
                self._linears.drop()

    def wake(self, beside: PendingWeights | None) -> None:
        """Take the memory again, and with it weights where there are none: their memory is used up one by one."""
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
            weights.progress()  # to lay out takes its time as well
            return parts[self._name_of[id(param)]]

        return PendingWeights(parts, self._linears.beside(value_of))


def _require_shape(served: ServedUnits, weights: Weights) -> None:
    """Where a config.json stands beside the weights, it must be of this model: not all of it shows in a tensor."""
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
    # The storage goes, and what looks at it stays: views of it are right again once it is back.
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _take(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        tensor.zero_()
