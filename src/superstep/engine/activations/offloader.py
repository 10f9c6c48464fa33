"""Offloader: the offloads and reloads of a program on one rank.

A storage that several units keep moves once, with the first of them. It comes back with the first that needs it, unless
somebody still holds it; while a tensor of it is on the device, the others take that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from superstep.comm.collectives import DONE, PendingCollective
from superstep.engine.activations.copiers import Copier
from superstep.engine.activations.saved_tensors import SavedTensor, SavedTensors, list_cached
from superstep.program.instructions import Program
from superstep.program.offload import Key, find_ended_offloads, list_moved

Cache = Mapping[object, Mapping[int, object]]
"""What selective recomputation keeps of a forward pass."""


@dataclass(slots=True)
class _MovedStorage:
    """A storage of which the content is elsewhere.

    Attributes:
        copier, part: where.
        size: its bytes.
        last: the storage that held it last, which may still live.
        users: units that keep it.
    """

    copier: Copier
    part: Any
    size: int
    last: StorageWeakRef
    users: int = 0

    def find(self) -> torch.UntypedStorage | None:
        """The storage, if it lives."""
        living: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.last.cdata)
        return living


@dataclass(slots=True)
class _MovedUnit:
    """What a unit keeps of a microbatch."""

    saved: SavedTensors
    groups: list[tuple[_MovedStorage, list[SavedTensor]]] = field(default_factory=list)
    leaving: PendingCollective = DONE
    arriving: PendingCollective = DONE
    storages: list[torch.UntypedStorage] = field(default_factory=list)


class Offloader:
    """Moves what units keep.

    Args:
        copiers: of each unit that moves something.
        caches: filled by selective recomputation in a forward pass.
        device: of the activations.
    """

    def __init__(self, copiers: Mapping[int, Copier], caches: list[Cache], device: torch.device) -> None:
        self._copiers = copiers
        self._caches = caches
        self._device = device
        self._program: Program | None = None
        self._moved: frozenset[Key] = frozenset()
        self._ended: Mapping[int, Sequence[Key]] = {}
        self._fixed: Collection[int] = ()
        self._units: dict[Key, _MovedUnit] = {}
        self._storages: dict[int, _MovedStorage] = {}

    def begin(self, program: Program, rank: int, fixed: Callable[[], Iterable[Tensor]]) -> None:
        """A run of a program begins.

        Args:
            program: of the run.
            rank: the pipeline rank.
            fixed: lists tensors whose storages never move.
        """
        if program is not self._program:
            self._program, self._moved = program, list_moved(program)
            self._ended = find_ended_offloads(program, rank)
        self._drop_rest()
        if self._moved:
            self._fixed = {tensor.untyped_storage()._cdata for tensor in fixed()}

    @contextmanager
    def collect(self, unit: int, m: int, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Note what the forward pass in the block keeps. ``inputs``: of the unit."""
        if (unit, m) not in self._moved:
            yield
            return
        self._caches.clear()
        saved = SavedTensors(self._fixed)
        with saved.collect():
            yield
        saved.add_owners([*inputs, *list_cached(self._caches)])
        self._caches.clear()
        self._units[unit, m] = _MovedUnit(saved)

    def offload(self, unit: int, m: int) -> PendingCollective:
        """Start an offload."""
        moved, copier = self._units[unit, m], self._copiers[unit]
        parts = []
        for storage, tensors in moved.saved.by_storage():
            known = self._storages.get(storage._cdata)
            if known is None:
                part = copier.allocate(storage.nbytes())
                known = _MovedStorage(copier, part, storage.nbytes(), StorageWeakRef(storage))
                self._storages[storage._cdata] = known
                parts.append((part, _bytes_of(storage)))
            known.users += 1
            moved.groups.append((known, tensors))
        moved.leaving = copier.store(parts)
        return moved.leaving

    def release(self, place: int) -> None:
        """Wait for the offloads that end before the instruction at a place, and free their memory."""
        for key in self._ended.get(place, ()):
            moved = self._units[key]
            moved.leaving.wait()
            for _, tensors in moved.groups:
                for tensor in tensors:
                    tensor.release()

    def reload(self, unit: int, m: int) -> PendingCollective:
        """Start a reload."""
        moved = self._units[unit, m]
        parts = []
        for known, _ in moved.groups:
            storage = known.find()
            if storage is None:
                storage = torch.empty(known.size, dtype=torch.uint8, device=self._device).untyped_storage()
                parts.append((known.part, _bytes_of(storage)))
                del self._storages[known.last.cdata]
                known.last = StorageWeakRef(storage)
                self._storages[storage._cdata] = known
            moved.storages.append(storage)
        moved.arriving = self._copiers[unit].load(parts)
        return moved.arriving

    def ready(self, unit: int, m: int) -> None:
        """Wait for a unit's reload, if it has one, and give its tensors their content."""
        moved = self._units.get((unit, m))
        if moved is None or not moved.storages:
            return
        moved.arriving.wait()
        for (_, tensors), storage in zip(moved.groups, moved.storages, strict=True):
            for tensor in tensors:
                tensor.restore(storage)
        # From here on only the graph holds them, and frees each as it has used it.
        moved.groups = [(known, []) for known, _ in moved.groups]
        moved.storages = []

    def finish(self, unit: int, m: int) -> None:
        """The unit's backward pass is over."""
        moved = self._units.pop((unit, m), None)
        for known, _ in moved.groups if moved is not None else ():
            known.users -= 1
            if not known.users:
                known.copier.free(known.part)
                del self._storages[known.last.cdata]

    def _drop_rest(self) -> None:
        """Forget what a run that failed has left."""
        for key in list(self._units):
            for pending in (self._units[key].leaving, self._units[key].arriving):
                pending.wait()
            self.finish(*key)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
