"""Grouped products in one kernel (``torch._grouped_mm``): CUDA's checks, errors, and unwritten memory.

Sources in torch: ``aten/src/ATen/native/GroupedMMUtils.h`` for errors at the call, which the operator's meta kernel
raises; ``cuda/GroupedBlas.cpp`` for the GPUs that have the kernel; ``cuda/GroupMM.cu`` and ``cuda/GroupMMCommon.cuh``
for the kernel, its assertions at run time, and that it only writes rows of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from superstep.strict.gpu_attention import ALIGNED_BYTES, require
from superstep.strict.torch_cuda import launch_on_current

aten = torch.ops.aten

HAVE_KERNEL = (9, 10)
"""Major compute capabilities of GPUs with the kernel. On others, and with other dtypes than bf16, each group is a
product of its own: the host waits for the ends of the groups.
"""

MOST_GROUPS = 1023
NUMBERS = ALIGNED_BYTES // 2
"""Numbers of bf16 in an aligned address."""


def on(device: ModuleType) -> Callable[..., Tensor]:
    """The operator on tensors of the device.

    Args:
        device: the compiled module.
    """

    def grouped_mm(
        left: Tensor,
        right: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: Any = None,  # noqa: ANN401
    ) -> Tensor:
        capability = torch.cuda.get_device_capability(left.device)
        is_bf16 = left.dtype == right.dtype == torch.bfloat16 and out_dtype in (None, torch.bfloat16)
        if not is_bf16 or capability[0] not in HAVE_KERNEL:
            key = torch._C.DispatchKey.CompositeExplicitAutograd  # torch's own, a product for each group
            return aten._grouped_mm.default._op_dk(key, left, right, offs, bias, out_dtype)
        given = [x for x in (left, right, offs) if x is not None]
        for x in given:
            why = f"Expected all tensors to be on the same device, but found {left.device} and {x.device}"
            require(x.device == left.device, why)
        shape = aten._grouped_mm(
            *(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given)
        )
        for x in (left, right):
            require(x.data_ptr() % ALIGNED_BYTES == 0, "expected data_ptr to be aligned to 16 bytes")
        groups = len(offs) if offs is not None else len(left)
        require(groups <= MOST_GROUPS, f"Can't process more than 1024 groups, and here are {groups}")
        out = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=left.device)

        def run(reads: list[Tensor], writes: list[Tensor]) -> None:
            multiply(*reads, out=writes[0], writes_empty=capability < (10, 0))

        launch_on_current(device, given, [out], run, "aten::_grouped_mm")
        return out

    return grouped_mm


def multiply(left: Tensor, right: Tensor, offs: Tensor | None = None, *, out: Tensor, writes_empty: bool) -> None:
    """Write the kernel's result.

    Args:
        out: rows and columns outside of groups become NaN, like uninitialised memory.
        writes_empty: whether an empty sum is written as zeros: it is not on compute capability 10.0
            (pytorch/pytorch#172439).
    """
    if offs is None:
        out.copy_(left @ right)
        return
    ends = offs.tolist()
    assert_groups(ends, left, right)
    out.fill_(torch.nan)
    for group, (begin, end) in enumerate(pairwise([0, *ends])):
        if left.dim() == 2 and right.dim() == 3:
            out[begin:end] = left[begin:end] @ right[group]
        elif left.dim() == 3:
            out[:, begin:end] = left[group] @ right[:, begin:end]
        elif end > begin or writes_empty:
            out[group] = left[:, begin:end] @ right[begin:end]


def assert_groups(ends: Sequence[int], left: Tensor, right: Tensor) -> None:
    """The kernel's assertions: groups in order and within the tensors, each aligned to 16 bytes."""
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    of_rows, of_columns = right.dim() == 3, left.dim() == 3
    whole = left.shape[0] if of_rows else right.shape[-1] if of_columns else left.shape[1]
    is_row_major = left.stride(-1) == 1, right.stride(-1) == 1
    begins_within_row = not is_row_major[0] if of_rows else of_columns or is_row_major[0] or not is_row_major[1]
    rules = {
        "expected gemm dimension to be greater or equal 0": min(sizes) >= 0,
        "expected offset to be less than tensor size": max(ends) <= whole,
        "expected input tensor dynamic dimension byte size to be non-negative multiple of 16": not begins_within_row
        or not any(size % NUMBERS for size in sizes[:-1]),
    }
    for why, is_kept in rules.items():
        require(is_kept, f"CUDA error: device-side assert triggered: {why}: groups end at {list(ends)}")
