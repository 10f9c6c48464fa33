"""``torch.cuda`` on the strict device: what torch's build for CPUs lacks, by the generic calls that it has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from superstep.strict.build import MODULE
from superstep.strict.cudart import CudaError, Cudart

DeviceLike = torch.device | int | str | None
Run = Callable[[list[Tensor], list[Tensor]], None]
"""A kernel, given what it sees of the tensors that it reads and writes."""
CUDA_TYPE = 1
"""Of ``c10::DeviceType``."""

CAPABILITY = (9, 0)
SHARED_MEMORY_BYTES = 232_448
"""Of a block on sm_90 (CUDA C++ programming guide, table of technical specifications)."""


def index_of(device: DeviceLike = None) -> int:
    """The number of a device; of the current one where none is named."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **known: int) -> Stream:
        """A new stream of a device, or one that is known by its numbers."""
        if known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """An event that is over once all that was issued to this stream so far is."""
        event = new_event() if event is None else event
        event.record(self)
        return event


def known_stream(number: int, device: int) -> Stream:
    """A stream that exists, by its number."""
    return Stream(stream_id=number, device_index=device, device_type=CUDA_TYPE)


def new_event(*, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """``torch.cuda.Event``: torch's own class, since ``elapsed_time`` takes no subclass of it."""
    return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: DeviceLike = None) -> Stream:
    """The stream that this thread issues to."""
    stream = torch.accelerator.current_stream(torch.device("cuda", index_of(device)))
    return known_stream(stream.stream_id, stream.device_index)


def launch_on_current(device: ModuleType, reads: list[Tensor], writes: list[Tensor], run: Run, what: str) -> None:
    """Issue a kernel to the current stream of the GPU that its tensors are on."""
    stream = current_stream([*reads, *writes][0].device)
    device.launch(stream.stream_id or stream.device_index, reads, writes, run, what)


def set_device(device: DeviceLike) -> None:
    """``torch.cuda.set_device``, which makes a context there (cudaSetDevice, since CUDA 12)."""
    index = index_of(device)
    torch.accelerator.set_device_index(index)
    sys.modules[MODULE].make_context(index)


class StreamContext:
    """``torch.cuda.stream``: what is issued within goes to a stream; none changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)
        torch.accelerator.set_device_index(self.stream.device.index)

    def __exit__(self, *failure: object) -> None:
        if self.stream is None:
            return
        torch.accelerator.set_stream(self._before)
        if self._device != self.stream.device.index:
            set_device(self._device)


@contextlib.contextmanager
def current_device(device: DeviceLike) -> Iterator[None]:
    """``torch.cuda.device``."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index_of(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What ``torch.cuda`` tells of memory, in bytes."""

    device: ModuleType

    def of(self, device: DeviceLike) -> tuple[int, int, int, int]:
        """Allocated now and at most, reserved, and in all."""
        allocated, peak, reserved, total = self.device.memory(index_of(device))
        return allocated, peak, reserved, total

    def names(self) -> dict[str, Callable[..., Any]]:
        """By name in ``torch.cuda``."""
        return {
            "memory_allocated": lambda device=None: self.of(device)[0],
            "max_memory_allocated": lambda device=None: self.of(device)[1],
            "memory_reserved": lambda device=None: self.of(device)[2],
            "mem_get_info": lambda device=None: (self.of(device)[3] - self.of(device)[2], self.of(device)[3]),
            "reset_peak_memory_stats": lambda device=None: self.device.reset_peak(index_of(device)),
            "empty_cache": self.device.empty_cache,
            "get_device_properties": lambda device=None: SimpleNamespace(
                name="strict",
                total_memory=self.of(device)[3],
                major=CAPABILITY[0],
                minor=CAPABILITY[1],
                multi_processor_count=132,
                shared_memory_per_block_optin=SHARED_MEMORY_BYTES,
            ),
        }


@dataclass(frozen=True, slots=True)
class DefaultGenerators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``: that of each device."""

    device: ModuleType

    def __len__(self) -> int:
        return int(self.device.devices())

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a number, or a slice
        return [self.device.default_generator(each) for each in range(len(self))][index]


def install(device: ModuleType) -> None:
    """Put the names into ``torch.cuda``.

    Args:
        device: the compiled module.
    """
    names: dict[str, object] = {
        "Stream": Stream,
        "Event": new_event,
        "stream": StreamContext,
        "device": current_device,
        "current_stream": current_stream,
        "default_stream": lambda which=None: known_stream(0, index_of(which)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda which=None: torch.accelerator.synchronize(torch.device("cuda", index_of(which))),
        "set_device": set_device,
        "current_device": torch.accelerator.current_device_index,
        "device_count": device.devices,
        "is_available": lambda: True,
        "is_initialized": lambda: bool(device.contexts()),
        "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda which=None: CAPABILITY,
        "get_device_name": lambda which=None: "strict",
        "_initialized": True,  # torch.utils.checkpoint asks, before it keeps the state of random numbers
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": device.is_in_bad_fork,
        "default_generators": DefaultGenerators(device),
        "cudart": Cudart(device).itself,
        "CudaError": CudaError,
        **Statistics(device).names(),
    }
    for name, value in names.items():
        for module in (torch.cuda, torch.cuda.random):  # which has taken some of them
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.UntypedStorage.resize_ = _resize_by(device, torch.UntypedStorage.resize_)


def _resize_by(device: ModuleType, of_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """``UntypedStorage.resize_``, which calls CUDA's library for memory of a GPU."""

    def resize(storage: torch.UntypedStorage, size: int) -> object:
        if storage.device.type != "cuda":
            return of_cpu(storage, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    return resize
