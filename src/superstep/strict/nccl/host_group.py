"""The group of a ``cpu:gloo,cuda:nccl`` that tensors of the host go to.

Torch makes the process group of both backends, and replaces it by one whose class is Python's, as the emulated NCCL's
is. So the backend of the host is kept, and calls go to it by the device of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.strict.nccl.communicator import Communicator

c10d = dist.distributed_c10d

CALLS = (
    *(
        "allreduce",
        "allreduce_coalesced",
        "broadcast",
        "reduce",
        "allgather",
        "allgather_coalesced",
        "gather",
        "scatter",
    ),
    *("_allgather_base", "_reduce_scatter_base", "reduce_scatter", "alltoall", "alltoall_base", "send", "recv"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_gather_single_coalesced"),
    *("reduce_scatter_single_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)


def install() -> None:
    """Have torch keep the backend of the host."""
    make_group, make_gloo = c10d._new_process_group_helper, dist.ProcessGroupGloo
    made: list[dist.ProcessGroupGloo] = []

    class Gloo(make_gloo):  # type: ignore[valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            super().__init__(*args, **kwargs)
            made.append(self)

    def make(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        c10d.ProcessGroupGloo = Gloo
        try:
            group, store = make_group(*args, **kwargs)
            if isinstance(group, Communicator) and made:
                route(group, made[0], store)
        finally:
            c10d.ProcessGroupGloo = make_gloo
            made.clear()
        return group, store

    c10d._new_process_group_helper = make


def route(group: Communicator, gloo: dist.ProcessGroupGloo, store: dist.Store) -> None:  # type: ignore[name-defined]
    """Have a group's calls with tensors of the host go to Gloo."""
    host = dist.ProcessGroup(store, group.rank(), group.size())
    host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    host._set_group_name(group.group_name)  # type: ignore[arg-type]
    group.on_host = host
    for name in CALLS:
        if hasattr(group, name) and hasattr(host, name):
            setattr(group, name, _by_device(group, name, getattr(group, name)))


def _by_device(group: Communicator, name: str, on_gpu: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        first = next(_tensors(args), None)
        is_on_host = first is not None and first.is_cpu and group.on_host is not None
        return (getattr(group.on_host, name) if is_on_host else on_gpu)(*args, **kwargs)

    return call


def _tensors(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
