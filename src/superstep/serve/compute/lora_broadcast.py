"""Adapters come and go on the ranks that share a model: rank 0 says so between two steps, and all do it, or none.

[READ, ms, path ...] begin to read a folder, beside the steps; it is given up after so many ms
[IS_READ]            say whether that is over
[HOLD, number]       hold the adapter where all have read the same; else let go of what was read
[DROP, number]       let go of one
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from superstep.comm.collectives import from_first, stack_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.errors import ConfigError, UserError
from superstep.model.peft_adapter import Adapter
from superstep.serve.compute.agreement import all_true, first_reason
from superstep.serve.compute.lora import Adapters

READ, IS_READ, HOLD, DROP = FIRST = (-2, -3, -4, -5)
"""What an order begins with."""


def read(adapters: Adapters, folder: Path, group: Group | None, device: Device, timeout_s: float) -> None:
    """Begin to read an adapter, on every rank; each gives it up after so long. For rank 0.

    Raises:
        ConfigError: this model can have none.
    """
    if adapters.refusal:
        raise ConfigError(adapters.refusal)
    _tell([READ, round(timeout_s * 1000), *str(folder).encode()], group, device)
    adapters.read(folder, timeout_s)


def is_read(adapters: Adapters, group: Group | None, device: Device, most_s: float) -> bool:
    """Whether every rank has read, or cannot; waits for this rank's own for so long. For rank 0."""
    if not adapters.reader.wait(most_s):
        return False
    _tell([IS_READ], group, device)
    return all_true(adapters.reader.is_over, group, device)


def hold(adapters: Adapters, number: int, group: Group | None, device: Device) -> str:
    """Hold what was read under a number, on every rank; its version. For rank 0.

    Raises:
        UserError: it cannot be used, or is not the same on every rank. No rank holds it then.
    """
    _tell([HOLD, number], group, device)
    return _hold(adapters, number, group, device).version


def drop(adapters: Adapters, number: int, group: Group | None, device: Device) -> None:
    """Let go of an adapter, on every rank. For rank 0."""
    _tell([DROP, number], group, device)
    adapters.drop(number)


def obey(numbers: Sequence[int], adapters: Adapters, group: Group, device: Device) -> None:
    """Do what rank 0 says, an order that begins with one of ``FIRST``. For the other ranks."""
    match numbers:
        case [n, timeout_ms, *path] if n == READ:
            adapters.read(Path(bytes(path).decode()), timeout_ms / 1000)
        case [n] if n == IS_READ:
            all_true(adapters.reader.is_over, group, device)
        case [n, number] if n == HOLD:
            try:
                _hold(adapters, number, group, device)
            except UserError:  # rank 0 says so
                return
        case [_, number]:
            adapters.drop(number)


def _hold(adapters: Adapters, number: int, group: Group | None, device: Device) -> Adapter:
    folder = adapters.folder
    try:
        adapter, why = adapters.take_read(), None
    except UserError as error:
        adapter, why = None, error
    told = first_reason("" if why is None else str(why), group, device)
    if why is not None:
        raise why
    if told or adapter is None:
        raise ConfigError(told)
    if not _is_same(adapter, group, device):
        raise ConfigError(f"adapter '{folder}' is not the same on every rank; leave it alone while it is read.")
    adapters.put(number, adapter)
    return adapter


def _is_same(adapter: Adapter, group: Group | None, device: Device) -> bool:
    """Whether all ranks have read the same."""
    if group is None:
        return True
    mine = torch.tensor([int(adapter.version[:15], 16)], device=device.torch)
    found: list[int] = stack_ranks(mine, group).flatten().tolist()
    return min(found) == max(found)


def _tell(numbers: list[int], group: Group | None, device: Device) -> None:
    if group is not None:
        from_first(numbers, group, device.torch)
