"""Gloo with the tensors of emulated GPUs: collectives by way of the host, as Gloo has them.

Torch's build for CPUs has no work of Gloo for GPUs. Here a collective's tensors are copied to the host, and what it has
written is copied back. Gloo has no transfers of a GPU's tensors: it would read the GPU's memory from the host.

Source of the rules: ProcessGroupGlooCuda.cpp in torch/csrc/distributed/c10d, and the table of backends in
docs/source/distributed.md of torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from superstep.errors import CollectiveError

STAGED = (
    *("allreduce_", "broadcast_", "reduce_", "allgather_", "gather_", "scatter_", "reduce_scatter_", "alltoall_base_"),
    *(
        "_allgather_base_",
        "_reduce_scatter_base_",
        "all_gather_single_",
        "reduce_scatter_single_",
        "all_to_all_single_",
    ),
)
"""Operators of ``torch.ops.c10d``, under the names of all versions."""
TRANSFERS = ("send", "recv_", "recv_any_source_", "alltoall_")
"""Of the same; an exchange of lists is transfers."""


def install(device: ModuleType) -> torch.library.Library:
    """Give these operators kernels for GPUs, for as long as what is returned lives.

    Args:
        device: the compiled module.
    """
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():  # torch has kernels under these names, for a backend that is not built here
        warnings.simplefilter("ignore")
        for names, kernel in ((STAGED, make_staged), (TRANSFERS, make_refusal)):
            for name in names:
                if hasattr(torch.ops.c10d, name):
                    library.impl(name, kernel(name, device), "CUDA", allow_override=True)
    return library


def make_staged(name: str, device: ModuleType) -> Callable[..., Any]:
    """A collective by way of the host, which waits for it."""
    operator = getattr(torch.ops.c10d, name).default
    arguments = operator._schema.arguments
    written = [number for number, each in enumerate(arguments) if each.name.startswith(("tensors", "output"))]

    def kernel(*given: Any) -> Any:  # noqa: ANN401 - the arguments of any of the operators
        on_host = [_map(each, Tensor.cpu) for each in given]
        result = operator(*on_host)
        work = result[-1] if isinstance(result, tuple) else result
        work.wait()
        for number in written:
            for own, came in zip(_tensors(given[number]), _tensors(on_host[number]), strict=True):
                own.copy_(came)
        return (given[written[0]], work) if isinstance(result, tuple) else work

    return kernel


def make_refusal(name: str, device: ModuleType) -> Callable[..., Any]:
    """A transfer, which Gloo does not have."""

    def kernel(*given: Any) -> Any:  # noqa: ANN401
        raise CollectiveError(
            f"{name.rstrip('_')} of Gloo ({device.caller()}): it moves tensors of the host alone, and reads the memory "
            "of a GPU from the host otherwise; use NCCL, or .cpu()"
        )

    return kernel


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        return change(value)
    return [_map(each, change) for each in value] if isinstance(value, list) else value


def _tensors(value: Any) -> list[Tensor]:  # noqa: ANN401
    return [value] if isinstance(value, Tensor) else [each for part in value for each in _tensors(part)]
