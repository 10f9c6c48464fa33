"""measure: rates of this rank's products, attention and memory traffic, by shape and size.

Each kind of operation runs by itself, repeatedly within a small budget, and the median counts. Inputs and outputs
rotate through more memory than the near caches hold: repeated small copies would seem twice as fast. On a CPU the near
caches are overwritten before every run, as earlier operations do in a step, together with the code: for small
operations that is most of the time (an addition of a few numbers took 3.5 µs in a loop, and 19 this way; a norm by our
kernel 59 and 147).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.comm.device import Device
from superstep.cost.program.time.op_prices import LIKE
from superstep.cost.program.time.operation import AttentionOperation, MatmulOperation, MemoryOperation, Operation
from superstep.engine.attention.document_attention import DocumentAttend
from superstep.hardware.chip import CopyRate, ProductRate
from superstep.kernels import attention as attend
from superstep.kernels import cpu_library, cross_entropy, norm, swiglu
from superstep.kernels.product import by_fp32, by_onednn, linear
from superstep.numerics.accumulate_product import add_product
from superstep.numerics.dtypes import DTYPES
from superstep.plan.config import Dtype

KEPT_BYTES = {"cpu": 2**25, "cuda": 2**29}
"""Bytes of rotating memory: half of it inputs, half of it outputs. A GPU's cache holds 50 to 126 MB (H100, B200)."""

MOST = 64
"""Most rotating tensors."""

SIZES = {"cpu": tuple(2**n for n in (12, 15, 18, 20, 22, 24)), "cuda": tuple(2**n for n in (12, 16, 20, 24, 26, 28))}
"""Measured bytes of memory passes, around those of a step. A GPU needs only two launches' time for 16 MiB, and its rate
must be known beyond.
"""

COLUMNS = 1024
"""Columns of row-wise operations: norms, softmax, lookups."""

LARGEST = {"cpu": 1024, "cuda": 16384}
"""The largest measured dim of a product: beyond it the rate rises little, and one product takes long."""

AT_ONCE_S = 0.001
"""On a GPU, calls of about this time are timed together, at most 20: waiting for each would cost more than a small
kernel, and a step does not wait either.
"""

USUAL = MatmulOperation(rows=256, width=256, inner=256)
"""The product whose rate is measured for a model without products."""

Work = Callable[[], object]


class CacheFlusher:
    """Overwrites the near caches of a CPU core; does nothing on a GPU, where a few calls fill the caches.

    Args:
        device: CPU or GPU.
    """

    def __init__(self, device: Device) -> None:
        # Four MiB: twice the near caches of a current core.
        self._memory = torch.zeros(KEPT_BYTES["cpu"] // 32) if device.kind == "cpu" else None

    def __call__(self) -> None:
        if self._memory is not None:
            self._memory.add_(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """Options of timing.

    Attributes:
        device: to measure.
        budget_s: seconds of repetitions of each operation, after one warm-up.
        clock: seconds of any monotonic clock: the wall's, or of processor time on a busy machine.
        is_exact: whether products are torch's own, as in exact mode, and not those of ``kernels.product``.
        is_compiled: whether attention is that of ``kernels.attention``.
    """

    device: Device
    budget_s: float = 0.005
    clock: Callable[[], float] = time.perf_counter
    is_exact: bool = False
    is_compiled: bool = False

    def seconds(self, work: Work, calls: int = 1) -> float:
        """The median seconds of one of the ``calls`` in ``work``."""
        sweep = CacheFlusher(self.device)
        self._once(work, 1)
        at_once = 1
        if self.device.kind == "cuda":
            at_once = max(1, min(20, int(AT_ONCE_S / max(self._once(work, 1), 1e-9))))
        taken: list[float] = []
        end_s = time.perf_counter() + self.budget_s
        while len(taken) < 3 or time.perf_counter() < end_s:
            sweep()
            taken.append(self._once(work, at_once))
        return statistics.median(taken) / at_once / calls

    def _once(self, work: Work, times: int) -> float:
        start_s = self.clock()
        for _ in range(times):
            work()
        self.device.synchronize()
        return self.clock() - start_s


def measure_operations(
    operations: Iterable[Operation], dtype: Dtype, gauge: TimingOptions
) -> tuple[tuple[ProductRate, ...], tuple[CopyRate, ...]]:
    """The rates of these products and attentions, and of these kinds of passes at a few sizes each."""
    products: dict[tuple[str, int, int, int], ProductRate] = {}
    kernels = {"copy": None}
    for operation in operations:
        match operation:
            case MatmulOperation():
                rate = _product(_within(operation, gauge.device), dtype, gauge)
            case AttentionOperation():
                rate = _attention(operation, dtype, gauge)
            case MemoryOperation(kernel=kernel):
                is_ours = gauge.device.kind == "cpu" and cpu_library.is_compiled()
                kernels[kernel if is_ours else LIKE.get(kernel, kernel)] = None
                continue
            case _:
                continue
        products[rate.kernel, rate.rows, rate.width, rate.inner] = rate
    if not any(rate.kernel == "product" for rate in products.values()):
        rate = _product(USUAL, dtype, gauge)
        products[rate.kernel, rate.rows, rate.width, rate.inner] = rate
    kernels |= dict.fromkeys(("read", "write", "update"))
    sizes = SIZES[gauge.device.kind]
    # One memory for all: separate ones would take longer to allocate than to measure.
    memory = _fill((2, KEPT_BYTES[gauge.device.kind] // 8), "fp32", gauge)
    copies = [_copy(kernel, size, gauge, memory) for kernel in kernels if kernel in _PARTS for size in sizes]
    return tuple(products.values()), tuple(copies)


def _within(product: MatmulOperation, device: Device) -> MatmulOperation:
    """The product, with its dims limited to ``LARGEST``."""
    most = LARGEST[device.kind] * 4
    rows, width, inner = (min(size, most) for size in (product.rows, product.width, product.inner))
    batch = product.batch if product.kernel == "batch" else 1
    return MatmulOperation(rows=rows, width=width, inner=inner, batch=batch, kernel=product.kernel)


def _product(product: MatmulOperation, dtype: Dtype, gauge: TimingOptions) -> ProductRate:
    timed = {"product": _product_s, "gradient": _gradient_s, "batch": _batch_s}[product.kernel]
    return ProductRate(
        kernel=product.kernel,
        rate=dtype,
        rows=product.rows,
        width=product.width,
        inner=product.inner,
        flops_per_s=product.flops / timed(product, dtype, gauge),
    )


def _product_s(product: MatmulOperation, dtype: Dtype, gauge: TimingOptions) -> float:
    weight = _fill((product.width, product.inner), dtype, gauge)
    inputs = _inputs((product.rows, product.inner), dtype, gauge)
    outs = _inputs((product.rows, product.width), dtype, gauge)

    def multiply() -> Tensor:
        rows = next(inputs)
        if not gauge.is_exact and (by_onednn(rows, weight) or by_fp32(rows, weight)):
            return linear(rows, weight)
        return torch.mm(rows, weight.t(), out=next(outs))

    return gauge.seconds(multiply)


def _batch_s(product: MatmulOperation, dtype: Dtype, gauge: TimingOptions) -> float:
    lefts = _inputs((product.batch, product.rows, product.inner), dtype, gauge)
    rights = _inputs((product.batch, product.inner, product.width), dtype, gauge)
    return gauge.seconds(lambda: torch.bmm(next(lefts), next(rights)))


def _gradient_s(product: MatmulOperation, dtype: Dtype, gauge: TimingOptions) -> float:
    """Without the sum that a step counts as a separate operation: after each product of bf16."""
    lefts = _inputs((product.inner, product.rows), dtype, gauge)
    rights = _inputs((product.inner, product.width), dtype, gauge)
    totals = _inputs((product.rows, product.width), "fp32", gauge)

    def multiply() -> None:
        left, right = next(lefts).t(), next(rights)
        if gauge.is_exact:
            torch.mm(left, right)
        else:
            add_product(next(totals), left, right)

    if dtype == "fp32" or gauge.is_exact:
        return gauge.seconds(multiply)
    like = _fill((product.rows, product.width), dtype, gauge)
    sum_s = gauge.seconds(lambda: next(totals).add_(like))
    whole_s = gauge.seconds(multiply)
    return max(whole_s - sum_s, whole_s / 10)


def _attention(attention: AttentionOperation, dtype: Dtype, gauge: TimingOptions) -> ProductRate:
    shape = (1, attention.heads, attention.queries, attention.head_dim)
    keys = (1, attention.heads, attention.keys, attention.head_dim)
    q, k, v = (_fill(dims, dtype, gauge).requires_grad_(attention.is_backward) for dims in (shape, keys, keys))
    is_causal = attention.queries == attention.keys

    if gauge.is_compiled and attend.takes(q, k, v):
        return _rate(attention, dtype, _time_compiled((q.detach(), k.detach(), v.detach()), attention, gauge))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    if attention.is_backward:
        out = forward()
        gradient = torch.ones_like(out)
        taken_s = gauge.seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    else:
        taken_s = gauge.seconds(forward)
    return _rate(attention, dtype, taken_s)


def _time_compiled(qkv: attend.Qkv, attention: AttentionOperation, gauge: TimingOptions) -> float:
    is_causal = attention.queries == attention.keys
    if is_causal and gauge.device.kind == "cpu":
        return _time_called(qkv, attention, gauge)
    out, lse = attend.attend(*qkv, is_causal=is_causal)
    if attention.is_backward:
        return gauge.seconds(lambda: attend.attend_backward(out, qkv, out, lse, is_causal=is_causal))
    return gauge.seconds(lambda: attend.attend(*qkv, is_causal=is_causal))


def _time_called(qkv: attend.Qkv, attention: AttentionOperation, gauge: TimingOptions) -> float:
    """With the call of a block: a Python operator, which copies the kernel's layout."""
    call = DocumentAttend(None, is_compiled=True)
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in qkv)
    if not attention.is_backward:
        return gauge.seconds(lambda: call(q, k, v))
    out = call(q, k, v)
    gradient = torch.ones_like(out)
    return gauge.seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))


def _rate(attention: AttentionOperation, dtype: Dtype, taken_s: float) -> ProductRate:
    is_causal = attention.queries == attention.keys
    return ProductRate(
        kernel="attention-backward" if attention.is_backward else "attention",
        rate=dtype,
        rows=attention.queries,
        width=attention.keys,
        inner=attention.head_dim,
        # At the rate of a causal one, which has half the operations.
        flops_per_s=attention.flops / attention.count / taken_s * (1 if is_causal else 2),
    )


def _copy(kernel: str, size: int, gauge: TimingOptions, memory: Tensor) -> CopyRate:
    parts = _PARTS[kernel]
    columns = min(COLUMNS, size // (4 * parts))
    shape = (max(1, size // (4 * parts * columns)), columns)
    numel = math.prod(shape)
    count = max(1, min(MOST, memory.shape[1] // numel))
    inputs, outs = (cycle(half[: count * numel].view(count, *shape).unbind()) for half in memory)
    other = next(inputs)
    if kernel in _OURS:
        compute = _OURS[kernel][1](other)
        taken_s = gauge.seconds(lambda: compute(next(inputs)))
    else:
        work = PASSES[kernel][1]
        taken_s = gauge.seconds(lambda: work(next(inputs), other, next(outs)))
    return CopyRate(kernel=kernel, bytes=size, bytes_per_s=size / taken_s)


def _update(x: Tensor, other: Tensor, out: Tensor) -> object:
    # The kernel reads the step count on the device; an existing element needs no launch.
    torch._fused_adamw_(
        [x],
        [other],
        [out],
        [other],
        [],
        [x[0, 0]],
        lr=0.0,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1.0,
        amsgrad=False,
        maximize=False,
    )
    return None


# Kinds of passes: how many times their bytes are read or written, and the operation on an input, a constant input, and
# an output.
PASSES: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], object]]] = {
    "copy": (3, lambda x, other, out: torch.mul(x, other, out=out)),
    "read": (1, lambda x, other, out: torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "write": (1, lambda x, other, out: out.zero_()),
    "exp": (2, lambda x, other, out: torch.ops.aten.silu.out(x, out=out)),
    "softmax": (2, lambda x, other, out: torch.ops.aten._log_softmax.out(x, -1, False, out=out)),  # noqa: FBT003
    "gather": (2, lambda x, other, out: torch.index_select(x, 0, torch.arange(len(x), device=x.device), out=out)),
    "update": (7, _update),
}


def _norm(like: Tensor) -> Callable[[Tensor], object]:
    weight = like[0].clone().requires_grad_()
    return lambda x: norm.rms_norm(x, weight, 1e-6)


def _gate(like: Tensor) -> Callable[[Tensor], object]:
    up = like.detach().requires_grad_()
    return lambda x: swiglu.swiglu(x, up)


def _loss(like: Tensor) -> Callable[[Tensor], object]:
    targets = torch.zeros(len(like), dtype=torch.int64)
    return lambda x: cross_entropy.row_sums(x, targets, x.shape[1])


# Our own kernels, which allocate their output. As Python operators they start more slowly.
_OURS = {"norm": (2, _norm), "gate": (3, _gate), "loss": (1, _loss)}
_PARTS = {kernel: parts for kernel, (parts, _) in (PASSES | _OURS).items()}


def _fill(shape: tuple[int, ...], dtype: Dtype, gauge: TimingOptions) -> Tensor:
    return torch.full(shape, 0.5, dtype=DTYPES[dtype], device=gauge.device.torch)


def _inputs(shape: tuple[int, ...], dtype: Dtype, gauge: TimingOptions) -> Iterator[Tensor]:
    """Tensors of one shape, in rotation."""
    first = _fill(shape, dtype, gauge)
    count = max(1, min(MOST, KEPT_BYTES[gauge.device.kind] // 2 // first.nbytes))
    return cycle([first, *(first.clone() for _ in range(count - 1))])
