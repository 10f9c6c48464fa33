"""Records every operation of the dispatcher in the format of ``cost.program.time.operation``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from superstep.cost.program.time.delta_operations import rule_operations
from superstep.cost.program.time.operation import (
    AttentionOperation,
    Axis,
    CollectiveOperation,
    MatmulOperation,
    MemoryOperation,
    Operation,
    Operations,
    collect,
)
from superstep.hardware.cluster import Collective
from superstep.plan.model.attention_rule import DELTA_CHUNK
from superstep.plan.sharding.sequence import blocks

_ATEN, _C10D = torch.ops.aten, torch.ops.c10d

KERNELS: Mapping[str, str] = {
    "exp": "exp",
    "silu": "exp",
    "silu_backward": "exp",
    "gelu": "exp",
    "gelu_backward": "exp",
    "tanh": "exp",
    "sigmoid": "exp",
    "drop": "exp",
    "random_words": "exp",
    "rms_norm": "norm",
    "rms_norm_backward": "norm",
    "turn": "norm",
    "swiglu": "gate",
    "swiglu_backward": "gate",
    "row_sums": "loss",
    "row_gradients": "loss",
    "_log_softmax": "softmax",
    "_softmax": "softmax",
    "_softmax_backward_data": "copy",
    "linalg_vector_norm": "read",
    "sum": "read",
    "mv": "read",
    "zero": "write",
    "zeros": "write",
    "zeros_like": "write",
    "fill": "write",
    "embedding": "gather",
    "index_select": "gather",
    "index_copy": "gather",
    "index_add": "gather",
    "gather": "gather",
    "scatter_add": "gather",
}
"""Kinds of kernels by the operator's name; all others have the rate of a copy."""

NARROW = 8
"""Products with a side below this are bound by the memory traffic of their matrix; in a batch, their number decides."""

_COLLECTIVES: Mapping[str, Collective] = {
    "allreduce_": "all-reduce",
    "allreduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "send",
}


@dataclass
class TracedOperations:
    """Operations so far, and the memory that they allocated."""

    each: list[Operation] = field(default_factory=list)
    peak_bytes: int = 0
    """The peak of that memory; beside operations before it, how far both together grow beyond what those had left."""
    beside: TracedOperations | None = None
    """Operations before, of which these free results."""
    _left_bytes: int = 0
    _storages: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left_bytes = 0 if self.beside is None else self.beside.alive_bytes()

    def born(self, out: Any, given: Sequence[Tensor] = ()) -> None:  # noqa: ANN401
        """Note the storages of an operation's results; views and results in place have none of their own."""
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages and storage._cdata not in known:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self._let_go()
                    before = 0 if self.beside is None else self.beside.alive_bytes()
                    grown = sum(size for _, size in self._storages.values()) + before - self._left_bytes
                    self.peak_bytes = max(self.peak_bytes, grown)

    def _let_go(self) -> None:
        """Drop freed storages: their addresses may be used again."""
        gone = [address for address, (ref, _) in self._storages.items() if ref.expired()]
        for address in gone:
            del self._storages[address]

    def alive_bytes(self, *, but: Sequence[Tensor] = ()) -> int:
        """Memory that is still allocated, without some tensors'."""
        own = {tensor.untyped_storage()._cdata for tensor in but}
        return sum(size for address, (ref, size) in self._storages.items() if address not in own and not ref.expired())

    @property
    def operations(self) -> Operations:
        """Equal ones together."""
        return collect(self.each)


class OperationRecorder(TorchDispatchMode):
    """Records operations within ``noting``.

    Args:
        axes: of each process group, by its name.
    """

    def __init__(self, axes: Mapping[str, Axis]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = axes
        self._noted = TracedOperations()

    @contextmanager
    def noting(self, beside: TracedOperations | None = None) -> Iterator[TracedOperations]:
        """Record the operations within the block, beside those that left what they use."""
        self._noted = TracedOperations(beside=beside)
        with self:
            yield self._noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if func is _ATEN.searchsorted.Tensor:
            # Starts of each expert's rows: an even share of real numbers, since sizes follow from them.
            return _even(given[0].numel(), given[1].numel() - 1)
        if given and not any(isinstance(x, FakeTensor) for x in given):
            with _disable_current_modes():
                out = func(*args, **kwargs)
                if func.namespace == "c10d":  # numbers of rows: as many arrive
                    given[0].copy_(given[1])
                    self._noted.each += self._operations(func, args, given, out)
                return out
        out = func(*args, **kwargs)
        if func.namespace != "prim":
            self._noted.each += self._operations(func, args, given, out)
            self._noted.born(out, given)
        return out

    def _operations(self, func: Any, args: Any, given: Sequence[Tensor], out: Any) -> Iterator[Operation]:  # noqa: ANN401
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            yield from self._message(name, args)
        elif "scaled_dot_product" in name:
            yield _attention(name, given)
        elif name.startswith("document_attention"):  # as if every sequence was one document
            yield _attention(name, [x.transpose(1, 2) for x in given[:3]])
        elif name.startswith("delta_rule"):
            yield from _delta_rule(name, given)
        elif name.startswith("ring_attention"):
            yield from self._ring(name, args, given)
        elif name.rstrip("_").endswith("mm"):
            yield _product(given, out)
        elif name.startswith("convolution"):
            yield from _convolution(name, args, out)
        else:
            yield _pass(func, name, given, out)

    def _ring(self, name: str, args: Any, given: Sequence[Tensor]) -> Iterator[Operation]:  # noqa: ANN401
        """Attention to each block of a rank's keys, while the next ones arrive; gradients make one hop more. In
        addition, keys and values are stacked, parts are merged, and the sum is copied.
        """
        is_backward = "backward" in name
        q, k = given[1:3] if is_backward else given[:2]
        group = _resolve_process_group(args[-1])
        every = blocks(group.rank(), group.size())
        B, S, N, H = q.shape
        fp32 = torch.float32.itemsize
        pair = 2 * k.numel() * fp32
        yield MemoryOperation(kernel="copy", bytes=4 * k.nbytes)
        for number, block in enumerate(every):
            queries, keys = (len(range(S)[part]) for part in (block.queries(S), block.keys(S)))
            yield AttentionOperation(
                heads=B * N,
                queries=queries,
                keys=keys,
                head_dim=H,
                is_backward=is_backward,
                is_causal=block.is_causal,
            )
            if number > 0:
                yield MemoryOperation(kernel="copy", bytes=3 * fp32 * B * N * queries * H)
                yield MemoryOperation(kernel="copy", bytes=3 * (pair if is_backward else fp32 * B * N * queries))
            if is_backward:
                yield MemoryOperation(kernel="copy", bytes=2 * pair)
        yield MemoryOperation(kernel="copy", bytes=2 * q.nbytes)
        wide = fp32 if is_backward else 0
        axis = self._axes[args[-1]]
        for _ in every[1:]:
            yield CollectiveOperation(collective="send", axis=axis, bytes=2 * k.nbytes)
        for _ in every if wide else ():
            yield CollectiveOperation(collective="send", axis=axis, bytes=2 * k.numel() * wide)

    def _message(self, name: str, args: Any) -> Iterator[Operation]:  # noqa: ANN401
        collective = _COLLECTIVES.get(name)
        if collective is None:
            return
        tensors = [x for x in tree_iter(args) if isinstance(x, Tensor)]
        size = max(x.nbytes for x in tensors)
        group = next(x for x in tree_iter(args) if isinstance(x, torch.ScriptObject))
        axis = self._axes[dist.ProcessGroup.unbox(group).group_name]
        yield CollectiveOperation(collective=collective, axis=axis, bytes=size)


def _delta_rule(name: str, given: Sequence[Tensor]) -> Iterator[Operation]:
    """As if every sequence was one document; what ranks exchange of it is small."""
    is_backward = "backward" in name
    q, _, v = given[1:4] if is_backward else given[:3]
    (B, S, K, H), (N, V) = q.shape, v.shape[2:]
    yield from rule_operations(B * -(-S // DELTA_CHUNK), K, N, H, V, is_backward=is_backward)


def _even(pairs: int, experts: int) -> Tensor:
    """Starts of equal shares of the pairs, and the end of the last one: [experts + 1]."""
    with _disable_current_modes():
        return torch.arange(experts + 1) * pairs // experts


def _attention(name: str, given: Sequence[Tensor]) -> AttentionOperation:
    q, k = (given[1], given[2]) if "backward" in name else (given[0], given[1])
    B, N, S, H = q.shape
    return AttentionOperation(heads=B * N, queries=S, keys=k.shape[2], head_dim=H, is_backward="backward" in name)


def _product(given: Sequence[Tensor], out: Tensor) -> Operation:
    """A product, or for a narrow one, bound by memory, a pass over its inputs."""
    left, right = given[-2:]
    rows, inner, width = left.shape[-2], left.shape[-1], right.shape[-1]
    is_turned = left.stride(-2) == 1 < left.stride(-1)
    is_narrow, batch = min(rows, width, inner) < NARROW, math.prod(left.shape[:-2])
    product = MatmulOperation(
        rows=rows,
        width=width,
        inner=inner,
        batch=batch,
        kernel="gradient" if is_turned and left.ndim == 2 else "batch" if is_narrow and batch > 1 else "product",
    )
    if not is_narrow or batch > 1:
        return product
    return MemoryOperation(kernel="read", bytes=_bytes(left) + _bytes(right) + _bytes(out), product_flops=product.flops)


def _convolution(name: str, args: Any, out: Any) -> Iterator[MatmulOperation]:  # noqa: ANN401
    """A convolution as the product of its unfolded input with its weight (Chellapilla 2006); backward one for each
    gradient.
    """
    is_backward = name == "convolution_backward"
    x, weight = (args[1], args[2]) if is_backward else (args[0], args[1])
    y = args[0] if is_backward else out
    is_transposed, groups = (args[7], args[9]) if is_backward else (args[6], args[8])
    outer = x if is_transposed else y
    channels, inner = outer.shape[1], weight[0].numel()
    rows, width = outer.numel() // channels, channels // groups
    if not is_backward:
        yield MatmulOperation(rows=rows, width=width, inner=inner, batch=groups)
        return
    has_input, has_weight, _ = args[10]
    if has_input:
        yield MatmulOperation(rows=rows, width=inner, inner=width, batch=groups)
    if has_weight:
        yield MatmulOperation(rows=width, width=inner, inner=rows, batch=groups)


def _pass(func: Any, name: str, given: Sequence[Tensor], out: Any) -> MemoryOperation:  # noqa: ANN401
    returned = func._schema.returns
    is_view = bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    if is_view or name.startswith(("_unsafe_view", "empty")) or name == "new_empty":
        return MemoryOperation(kernel="view", bytes=0)
    made = [x for x in tree_iter(out) if isinstance(x, Tensor)]
    kernel = KERNELS.get(name.rstrip("_"), "copy")
    if kernel == "gather":
        # Of the table only the looked-up rows.
        rows = [x for x in (*given[1:], *made) if x.untyped_storage()._cdata != given[0].untyped_storage()._cdata]
        return MemoryOperation(kernel=kernel, bytes=2 * sum(map(_bytes, rows)))
    return MemoryOperation(kernel=kernel, bytes=sum(map(_bytes, made)) + sum(map(_bytes, given)))


def _bytes(x: Tensor) -> int:
    """Bytes that are read: expanded dims count once."""
    return x.element_size() * math.prod(
        size for size, step in zip(x.shape, x.stride(), strict=True) if step or size == 1
    )
