"""SavedTensors: the tensors that a unit keeps for its backward pass, by the storages that hold them.

Three holders keep them, and each is handled by itself:

    autograd          what its graph saves passes ``saved_tensors_hooks``: the graph holds a handle, and not the tensor
    the unit          its inputs are the leaves of the graph, so the tensors stay and give up their storage
    selective recompute   the results that it caches give up their storage too
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(slots=True)
class SavedTensor:
    """A tensor that is kept: a view of a storage.

    Attributes:
        tensor: None while its storage is elsewhere.
        owner: a tensor of another holder, which then has no elements; None for a handle of autograd.
    """

    tensor: Tensor | None
    owner: Tensor | None
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def release(self) -> None:
        """Give up the storage."""
        self.tensor = None
        if self.owner is not None:
            self.owner.data = torch.empty(0, dtype=self.dtype, device=self.owner.device)

    def restore(self, storage: torch.UntypedStorage) -> None:
        """The same view of another storage."""
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        view.set_(storage, self.offset, self.size, self.stride)
        if self.owner is None:
            self.tensor = view
        else:
            self.owner.data = view


class SavedTensors:
    """The tensors of one unit and one microbatch.

    Args:
        fixed: identities (``_cdata``) of storages that never move: parameters, and fields of the batch.
    """

    def __init__(self, fixed: Collection[int]) -> None:
        self._fixed = fixed
        self._saved: list[SavedTensor] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note what autograd saves within the block."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def add_owners(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors of other holders."""
        for tensor in tensors:
            if self._moves(tensor):
                self._saved.append(_describe(tensor.detach(), tensor))

    def by_storage(self) -> list[tuple[torch.UntypedStorage, list[SavedTensor]]]:
        """Each storage once, with its tensors."""
        groups: dict[int, tuple[torch.UntypedStorage, list[SavedTensor]]] = {}
        for saved in self._saved:
            assert saved.tensor is not None
            storage = saved.tensor.untyped_storage()
            groups.setdefault(storage._cdata, (storage, []))[1].append(saved)
        self._saved = []
        return list(groups.values())

    def _pack(self, tensor: Tensor) -> Tensor | SavedTensor:
        if not self._moves(tensor):
            return tensor
        self._saved.append(_describe(tensor.detach(), None))
        return self._saved[-1]

    def _moves(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        return is_plain and tensor.numel() > 0 and tensor.untyped_storage()._cdata not in self._fixed


def _describe(tensor: Tensor, owner: Tensor | None) -> SavedTensor:
    return SavedTensor(
        tensor=tensor,
        owner=owner,
        dtype=tensor.dtype,
        offset=int(tensor.storage_offset()),
        size=tuple(tensor.shape),
        stride=tensor.stride(),
    )


def _unpack(saved: Tensor | SavedTensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    assert saved.tensor is not None, "a saved tensor is read while it is elsewhere"
    return saved.tensor


def list_cached(caches: Iterable[Mapping[object, Mapping[int, object]]]) -> list[Tensor]:
    """The tensors in the caches of ``create_selective_checkpoint_contexts``."""
    kept = [entry for cache in caches for calls in cache.values() for entry in calls.values()]
    leaves = torch.utils._pytree.tree_leaves(kept)
    return [leaf.val for leaf in leaves if isinstance(getattr(leaf, "val", None), Tensor)]
