"""``torch.cuda`` on the strict device: the parts that torch's build for CPUs lacks, from its generic calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from superstep.strict import gpu_refused
from superstep.strict.build import MODULE
from superstep.strict.cudart import CudaError, Cudart
from superstep.strict.gpu_memory import CAPABILITY, MemoryCalls

DeviceLike = torch.device | int | str | None
Run = Callable[[list[Tensor], list[Tensor]], None]
"""A kernel, called with its views of the tensors that it reads and writes."""
CUDA_TYPE = 1
"""Value of ``c10::DeviceType``."""


def index_of(device: DeviceLike = None) -> int:
    """The number of a device; by default of the current one."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **known: int) -> Stream:
        """A new stream of a device, or an existing one by its numbers."""
        if known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event after all work in this stream so far."""
        event = Event() if event is None else event
        event.record(self)
        return event


def find_stream(number: int, device: int) -> Stream:
    """An existing stream, by its number."""
    return Stream(stream_id=number, device_index=device, device_type=CUDA_TYPE)


class Event(torch.Event):
    """``torch.cuda.Event``."""

    is_timed: bool

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        """An event that is not recorded yet."""
        event = super().__new__(
            cls, device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )
        event.is_timed = enable_timing
        return event

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this event to a later one. Torch's own accepts no subclass of its events."""
        if not (self.is_timed and other.is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and other.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        milliseconds: float = sys.modules[MODULE].elapsed_ms(self.event_id, other.event_id)
        return milliseconds


def current_stream(device: DeviceLike = None) -> Stream:
    """This thread's current stream."""
    stream = torch.accelerator.current_stream(torch.device("cuda", index_of(device)))
    return find_stream(stream.stream_id, stream.device_index)


def launch_on_current(device: ModuleType, reads: list[Tensor], writes: list[Tensor], run: Run, what: str) -> None:
    """Issue a kernel to the current stream of its tensors' GPU."""
    stream = current_stream([*reads, *writes][0].device)
    device.launch(stream.stream_id or stream.device_index, reads, writes, run, what)


def set_device(device: DeviceLike) -> None:
    """``torch.cuda.set_device``, which makes a context there (cudaSetDevice, since CUDA 12)."""
    index = index_of(device)
    torch.accelerator.set_device_index(index)
    sys.modules[MODULE].make_context(index)


class StreamContext:
    """``torch.cuda.stream``: sets the current stream; None changes nothing."""

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


def exchange_device(index: int) -> int:
    """Make a device current, and return the earlier one; a negative number changes nothing."""
    if index < 0:
        return -1
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    return before


@dataclass(frozen=True, slots=True)
class DefaultGenerators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``: one for each device."""

    device: ModuleType

    def __len__(self) -> int:
        return int(self.device.devices())

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a number, or a slice
        return [self.device.default_generator(each) for each in range(len(self))][index]


def install(device: ModuleType) -> None:
    """Install the names in ``torch.cuda``.

    Args:
        device: the compiled module.
    """
    memory = MemoryCalls(device)
    memory.install()
    names: dict[str, object] = {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "current_stream": current_stream,
        "default_stream": lambda device=None: find_stream(0, index_of(device)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(torch.device("cuda", index_of(device))),
        "set_device": set_device,
        "current_device": torch.accelerator.current_device_index,
        "device_count": device.devices,
        "can_device_access_peer": lambda device, peer_device: index_of(device) != index_of(peer_device),
        "is_available": lambda: True,
        "is_initialized": lambda: bool(device.contexts()),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_arch_list": lambda: [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"],
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: "strict",
        "get_device_properties": lambda device=None: memory.properties(index_of(device)),
        "mem_get_info": lambda device=None: memory.free_and_total(index_of(device)),
        "_initialized": True,  # torch.utils.checkpoint reads it before it saves the state of random numbers
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": device.is_in_bad_fork,
        "default_generators": DefaultGenerators(device),
        "cudart": Cudart(device).itself,
        "CudaError": CudaError,
    }
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):  # both have imported some of the names
        for name, value in names.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.cuda.nvtx._nvtx = NoMarks()
    gpu_refused.install()
    torch.UntypedStorage.resize_ = _resize_by(device, torch.UntypedStorage.resize_)


class NoMarks:
    """NVTX without a profiler: marks and ranges are ignored."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def _resize_by(device: ModuleType, of_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """``UntypedStorage.resize_``, which calls CUDA's library for memory of a GPU."""

    def resize(storage: torch.UntypedStorage, size: int) -> object:
        if storage.device.type != "cuda":
            return of_cpu(storage, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    return resize
