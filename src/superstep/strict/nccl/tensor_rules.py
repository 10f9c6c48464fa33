"""The tensors that ProcessGroupNCCL takes, and the memory that NCCL moves of them.

NCCL moves as many elements as a tensor has, from its first address on, in the order of memory. So a tensor whose
strides leave no gap arrives whole, in the memory format that it was sent in.

Source of the rules: ``check_gpu_single_tensor`` and ``check_gpu_tensors_same_device`` in
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from superstep.strict.nccl.transport import FLOAT8

DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8),
}
"""What NCCL knows (``ncclDataType`` in torch/csrc/distributed/c10d/NCCLUtils.hpp); complex numbers go as real ones."""

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the dimensions of a tensor, its memory format beside the contiguous one."""


def refusal_of(tensors: Sequence[Tensor], *, takes_dense: bool) -> str:
    """Why ProcessGroupNCCL refuses the tensors of a call; empty if it does not.

    Args:
        tensors: of the call.
        takes_dense: whether any strides without gaps will do: those of ``channels_last`` always do. Transfers and
            exchanges take gaps too, with a warning, and then move what lies in them; here they are refused.
    """
    first = tensors[0]
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"No backend type associated with device type {tensor.device.type}; a tensor must be on a GPU"
        if tensor.device != first.device:
            return f"its tensors are on {first.device} and {tensor.device}; they must be on one GPU"
        if tensor.dtype not in DTYPES and not tensor.is_complex():
            return f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
        if tensor.dtype != first.dtype:
            return f"its tensors are of {first.dtype} and {tensor.dtype}; they must have one type"
        if not (is_in_a_format(tensor) or (takes_dense and not has_gaps(tensor))):
            given = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            return f"Tensors must be contiguous; one has {given}, and .contiguous() copies it"
    return ""


def has_gaps(tensor: Tensor) -> bool:
    """Whether its memory holds more than its elements, or an element twice."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() > 0
        expected *= size
    return False


def is_in_a_format(tensor: Tensor) -> bool:
    """Whether its memory is contiguous, in the order of its dimensions or with the channels last."""
    other = FORMATS.get(tensor.dim())
    return tensor.is_contiguous() or (other is not None and tensor.is_contiguous(memory_format=other))


def in_memory(tensor: Tensor) -> Tensor:
    """The same shape over the same memory, in the order of memory; one with gaps as it is."""
    if tensor.is_contiguous() or has_gaps(tensor):
        return tensor
    return tensor.detach().as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def in_words(*tensors: Tensor) -> str:
    """Number, type and order in memory of elements of tensors, with equal ones counted."""
    each = (f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}{_order_of(tensor)}" for tensor in tensors)
    counts = [(len(list(same)), words) for words, same in itertools.groupby(each)]
    return ", ".join(f"{count} x {words}" if count > 1 else words for count, words in counts)


def _order_of(tensor: Tensor) -> str:
    if tensor.is_contiguous() or has_gaps(tensor):
        return ""
    if is_in_a_format(tensor):
        return f" in {str(FORMATS[tensor.dim()]).removeprefix('torch.')}"
    return f" with strides {tensor.stride()}"
