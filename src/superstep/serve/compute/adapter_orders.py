"""Adapters come and go on the ranks that share a model: rank 0 says so between two steps, and all do it, or none.

[LOAD, number, path ...]     read a folder, and hold the adapter where all have read the same
[DROP, number]               let go of one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from superstep.errors import ConfigError, UserError
from superstep.model.adapter import Adapter, read_adapter
from superstep.runtime.collectives import from_first, stack_ranks
from superstep.runtime.device import Device
from superstep.runtime.mesh import Group
from superstep.serve.compute.adapters import Adapters
from superstep.serve.reader import Reader

LOAD, DROP = FIRST = (-2, -3)
"""What an order begins with."""


def begin(adapters: Adapters, folder: Path) -> Reader[Adapter]:
    """Begin to read an adapter."""
    if adapters.refusal:
        raise ConfigError(adapters.refusal)

    def read(progress: Callable[[], None]) -> Adapter:
        return read_adapter(folder, adapters.linears)

    return Reader(folder, read, timeout_s=adapters.timeout_s)


def load(adapters: Adapters, number: int, folder: Path, group: Group | None, device: Device) -> str:
    """Hold an adapter under a number, on every rank; its version. For rank 0.

    Raises:
        UserError: it cannot be used, or is not the same on every rank. No rank holds it then.
    """
    adapter = begin(adapters, folder).result()
    if group is not None:
        from_first([LOAD, number, *str(folder).encode()], group, device.torch)
        if not _is_everywhere(adapter, group, device):
            raise ConfigError(f"adapter '{folder}' is not the same on every rank; leave it alone while it is read.")
    adapters.put(number, adapter)
    return adapter.version


def drop(adapters: Adapters, number: int, group: Group | None, device: Device) -> None:
    """Let go of an adapter, on every rank. For rank 0."""
    if group is not None:
        from_first([DROP, number], group, device.torch)
    adapters.drop(number)


def obey(numbers: Sequence[int], adapters: Adapters, group: Group, device: Device) -> None:
    """Do what rank 0 says, an order that begins with one of ``FIRST``. For the other ranks."""
    match numbers:
        case [n, number, *path] if n == LOAD:
            try:
                adapter = begin(adapters, Path(bytes(path).decode())).result()
            except UserError:
                adapter = None
            if _is_everywhere(adapter, group, device) and adapter is not None:
                adapters.put(number, adapter)
        case [_, number]:
            adapters.drop(number)


def _is_everywhere(adapter: Adapter | None, group: Group, device: Device) -> bool:
    """Whether all ranks have read the same."""
    mine = 0 if adapter is None else int(adapter.version[:15], 16)
    found: list[int] = stack_ranks(torch.tensor([mine], device=device.torch), group).flatten().tolist()
    return min(found) == max(found) != 0
