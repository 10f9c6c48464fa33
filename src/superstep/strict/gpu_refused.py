"""Names of torch that the emulated GPU does not support: each raises an error when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

REFUSED = {
    "CUDA graphs": ("cuda.CUDAGraph", "cuda.graph", "cuda.graph_pool_handle", "cuda.make_graphed_callables"),
    "handles of CUDA's libraries": ("cuda.current_blas_handle", "cuda.current_solver_handle"),
    "streams and contexts of other libraries": (
        "cuda.ExternalStream", "cuda.GreenContext", "cuda.get_stream_from_external",
    ),
    "allocators but its own": (
        "cuda.CUDAPluggableAllocator", "cuda.MemPool", "cuda.caching_allocator_alloc", "cuda.caching_allocator_delete",
        "cuda.caching_allocator_enable", "cuda.change_current_allocator", "cuda.use_mem_pool",
    ),
    "record of pieces of memory": (
        "cuda.host_memory_stats", "cuda.host_memory_stats_as_nested_dict", "cuda.memory_snapshot",
        "cuda.reset_accumulated_host_memory_stats", "cuda.reset_peak_host_memory_stats",
        "cuda.memory._dump_snapshot", "cuda.memory._record_memory_history", "cuda.memory._snapshot",
    ),
    "share of its memory (give it as much as the share is)": (
        "cuda.get_per_process_memory_fraction", "cuda.set_per_process_memory_fraction",
    ),
    "mode for waits of the host, which it counts": ("cuda.get_sync_debug_mode", "cuda.set_sync_debug_mode"),
    "sensors": (
        "cuda.clock_rate", "cuda.device_memory_used", "cuda.list_gpu_processes", "cuda.memory_usage",
        "cuda.power_draw", "cuda.temperature", "cuda.utilization",
    ),
    "copies by one thread to several GPUs": (
        "nn.parallel.comm.broadcast", "nn.parallel.comm.broadcast_coalesced", "nn.parallel.comm.gather",
        "nn.parallel.comm.reduce_add", "nn.parallel.comm.reduce_add_coalesced", "nn.parallel.comm.scatter",
    ),
    "version of NCCL": ("cuda.nccl.version",),
}  # fmt: skip
"""Unsupported features, and their names."""

COMPILED = "torch.compile: the emulated GPU runs no compiled kernels; leave it out, or compile by backend='eager'"


def refuse(name: str, what: str) -> type:
    """A replacement for a function or a class."""

    def refuses(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        raise NotImplementedError(f"torch.{name}: the emulated GPU has no {what}")

    return type(name.rpartition(".")[2], (), {"__new__": refuses, "__doc__": f"Not there: {what}."})


def install() -> None:
    """Install them in torch."""
    for what, names in REFUSED.items():
        for name in names:
            place, _, last = name.rpartition(".")
            module = importlib.import_module(f"torch.{place}")
            if hasattr(module, last):  # newer versions of torch have more
                setattr(module, last, refuse(name, what))
    inductor: Any = torch._TorchCompileInductorWrapper
    of_torch = inductor.__call__

    def compile_graph(self: Any, graph: Any, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        if any(isinstance(each, torch.Tensor) and each.is_cuda for each in inputs):
            raise NotImplementedError(COMPILED)
        return of_torch(self, graph, inputs)

    inductor.__call__ = compile_graph
