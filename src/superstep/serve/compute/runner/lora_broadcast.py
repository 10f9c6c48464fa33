"""Adapters on all ranks of a server: rank 0 sends a command between two steps, and all ranks apply it, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from superstep.comm.codec import Codec
from superstep.comm.collectives import from_first, stack_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.errors import ConfigError, UserError
from superstep.model.files.peft_adapter import Adapter
from superstep.serve.compute.lora import Adapters
from superstep.serve.compute.runner.agreement import all_true, first_reason

ADAPTER_ORDER = -2
"""Marks a command among the integer messages of rank 0."""


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Start to read a folder in the background, within ``timeout_s``."""

    folder: str
    timeout_s: float


class IsAdapterRead(msgspec.Struct, frozen=True, tag=True):
    """Agree whether all ranks have finished reading."""


class HoldAdapter(msgspec.Struct, frozen=True, tag=True):
    """Add the adapter if all ranks have read the same one; else drop it."""

    number: int


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Drop an adapter."""

    number: int


Order = ReadAdapter | IsAdapterRead | HoldAdapter | DropAdapter
ORDERS: Codec[Order] = Codec(Order)


def read(adapters: Adapters, folder: Path, group: Group | None, device: Device, timeout_s: float) -> None:
    """Start to read an adapter on every rank, within ``timeout_s``. Called on rank 0.

    Raises:
        ConfigError: the model supports no adapters.
    """
    if adapters.refusal:
        raise ConfigError(adapters.refusal)
    _send(ReadAdapter(str(folder), timeout_s), group, device)
    adapters.read(folder, timeout_s)


def is_read(adapters: Adapters, group: Group | None, device: Device, most_s: float) -> bool:
    """Whether every rank has finished reading; waits at most ``most_s`` for this rank's reader. Called on rank 0."""
    if not adapters.reader.wait(most_s):
        return False
    _send(IsAdapterRead(), group, device)
    return all_true(adapters.reader.is_over, group, device)


def hold(adapters: Adapters, number: int, group: Group | None, device: Device) -> str:
    """Add the adapter that was read, under this number, on every rank; returns its version. Called on rank 0.

    Raises:
        UserError: it cannot be used, or differs between ranks. Then no rank keeps it.
    """
    _send(HoldAdapter(number), group, device)
    return _hold(adapters, number, group, device).version


def drop(adapters: Adapters, number: int, group: Group | None, device: Device) -> None:
    """Drop an adapter on every rank. Called on rank 0."""
    _send(DropAdapter(number), group, device)
    adapters.drop(number)


def obey(numbers: Sequence[int], adapters: Adapters, group: Group, device: Device) -> None:
    """Apply a command of rank 0: the integers after ``ADAPTER_ORDER``. Called on the other ranks."""
    match ORDERS.from_numbers(numbers):
        case ReadAdapter(folder, timeout_s):
            adapters.read(Path(folder), timeout_s)
        case IsAdapterRead():
            all_true(adapters.reader.is_over, group, device)
        case HoldAdapter(number):
            try:
                _hold(adapters, number, group, device)
            except UserError:  # rank 0 reports it
                return
        case DropAdapter(number):
            adapters.drop(number)


def _hold(adapters: Adapters, number: int, group: Group | None, device: Device) -> Adapter:
    folder = adapters.folder
    try:
        adapter, why = adapters.take_read(), None
    except UserError as error:
        adapter, why = None, error
    reason = first_reason("" if why is None else str(why), group, device)
    if why is not None:
        raise why
    if reason or adapter is None:
        raise ConfigError(reason)
    if not _is_same(adapter, group, device):
        raise ConfigError(
            f"adapter '{folder}' is not the same on every rank; do not change its files while a server reads them."
        )
    adapters.put(number, adapter)
    return adapter


def _is_same(adapter: Adapter, group: Group | None, device: Device) -> bool:
    """Whether all ranks have read the same adapter."""
    if group is None:
        return True
    mine = torch.tensor([int(adapter.version[:15], 16)], device=device.torch)
    numbers: list[int] = stack_ranks(mine, group).flatten().tolist()
    return min(numbers) == max(numbers)


def _send(order: Order, group: Group | None, device: Device) -> None:
    if group is not None:
        from_first([ADAPTER_ORDER, *ORDERS.to_numbers(order)], group, device.torch)
