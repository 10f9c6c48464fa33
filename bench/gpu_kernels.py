"""Triton's kernels beside torch's own operations, and what torch.compile makes of these: a piece of ``bench.gpu``.

Of each: seconds of forward and backward, how often ours has run in the time of each other, the peak of memory above
what was there, and the error of results and gradients against fp64 relative to their size, by L2 norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.comm.device import Device
from superstep.engine.measure.probe_kernels import TimingOptions
from superstep.kernels.gpu.attention import VisibleKeys, attention
from superstep.kernels.gpu.norm import rms_norm
from superstep.kernels.gpu.rope import rope
from superstep.kernels.gpu.swiglu import swiglu
from superstep.kernels.position_bias import alibi, t5
from superstep.numerics.loss import linear_cross_entropy_sum

Compute = Callable[..., Tensor]

TOKENS = 4096
"""Of all sequences that attend at once, where one has no more."""

CHECKED = 2048
"""Tokens up to which all scores at once have room in fp64."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What is computed, by us and by torch.

    Attributes:
        name: with its sizes.
        ours, torch: functions of the inputs.
        inputs: their gradients are computed.
        exact: torch's in fp64, where that is another one.
        is_checked: whether there is room for fp64.
    """

    name: str
    ours: Compute
    torch: Compute
    inputs: Sequence[Tensor]
    exact: Compute | None = None
    is_checked: bool = True


def computed(run: Compute, operation: Operation, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result, and the gradients of the inputs for a gradient of ones."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def measured(operation: Operation, device: Device, compiled: Callable[[Compute], Compute]) -> dict[str, object]:
    """One row of the table."""
    sides = {"ours": operation.ours, "torch": operation.torch, "torch.compile": compiled(operation.torch)}
    row: dict[str, object] = {"operation": operation.name, "dtype": str(operation.inputs[0].dtype).split(".")[1]}
    seconds, peaks, errors = {}, {}, {}
    exact = []
    if operation.is_checked:
        wide = [x.double() for x in operation.inputs]
        exact = computed(operation.exact or operation.torch, operation, wide)
    for name, run in sides.items():
        found = computed(run, operation, operation.inputs)
        if operation.is_checked:
            errors[name] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        del found
        before = device.count_from_here()
        seconds[name] = TimingOptions(device=device).seconds(lambda run=run: computed(run, operation, operation.inputs))
        peaks[name] = device.peak_bytes() - before
    faster = {name: taken / seconds["ours"] for name, taken in seconds.items() if name != "ours"}
    return {**row, "seconds": seconds, "faster_by": faster, "peak_bytes": peaks, "errors": errors}


def attended(
    device: torch.device, dtype: torch.dtype, tokens: int, width: int, heads: int = 8, kv_heads: int = 2
) -> Iterator[Operation]:
    """Causal attention of grouped heads: plain, of documents, and with biases. Torch takes its fastest for each."""
    sequences = max(1, TOKENS // tokens)
    q, k, v = (torch.randn(sequences, n, tokens, width, device=device).to(dtype) for n in (heads, kv_heads, kv_heads))
    at = torch.arange(tokens, device=device)
    distance = at[:, None] - at
    starts = (at - at % max(1, tokens // 5)).expand(sequences, -1).contiguous()
    table = torch.randn(heads, 32, device=device)

    def side(mask: Tensor | None) -> Compute:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask
            return F.scaled_dot_product_attention(q, k, v, given, is_causal=mask is None, enable_gqa=True)

        return run

    def biased(bias: Tensor) -> Tensor:
        return bias.masked_fill(distance < 0, -torch.inf)

    kinds = {
        "attention": (VisibleKeys(), None),
        "documents": (VisibleKeys(starts=starts), (distance >= 0) & (at >= starts[0][:, None])),
        "window": (VisibleKeys(window=max(1, tokens // 4)), (distance >= 0) & (distance < max(1, tokens // 4))),
        "alibi": (VisibleKeys(bias=alibi(heads, device)), biased(alibi(heads, device).of(distance.clamp(min=0)))),
        "t5": (VisibleKeys(bias=t5(table)), biased(t5(table).of(distance.clamp(min=0)))),
    }
    for name, (sees, mask) in kinds.items():
        yield Operation(
            f"{name} {list(q.shape)}",
            lambda q, k, v, sees=sees: attention(q, k, v, sees),
            side(mask),
            (q, k, v),
            is_checked=tokens <= CHECKED,
        )


def others(device: torch.device, dtype: torch.dtype, tokens: int, width: int, vocab: int) -> Iterator[Operation]:
    """All but attention."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    rows, targets = drawn(tokens, width), torch.randint(vocab, (tokens,), device=device)
    yield Operation(
        f"rms_norm {tokens} x {width}",
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
        (rows, drawn(width)),
    )
    up = drawn(tokens, 3 * width)
    yield Operation(f"swiglu {tokens} x {3 * width}", swiglu, lambda g, u: F.silu(g) * u, (up, drawn(*up.shape)))
    angle = torch.randn(tokens, 1, 64, device=device)
    cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))
    sin = torch.cat((-sin[..., :64], sin[..., 64:]), -1)

    def turned(x: Tensor) -> Tensor:
        return torch.addcmul(x * cos.to(x.dtype), x.roll(64, -1), sin.to(x.dtype))

    yield Operation(f"rope {tokens} x 8 x 128", lambda x: rope(x, cos, sin), turned, (drawn(1, tokens, 8, 128),))
    yield Operation(
        f"linear and cross entropy {tokens} x {width} x {vocab}",
        lambda h, w: linear_cross_entropy_sum(h, w, targets, is_compiled=True),
        lambda h, w: F.cross_entropy(
            (h @ w.t()).to(torch.promote_types(h.dtype, torch.float32)), targets, reduction="sum"
        ),
        (rows, drawn(vocab, width) / width**0.5),
    )


def kernels(
    device: Device,
    lengths: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    width: int = 4096,
    vocab: int = 32000,
    compiled: Callable[[Compute], Compute] = torch.compile,
) -> dict[str, object]:
    """All rows."""
    rows = []
    for dtype in dtypes:
        made = [attended(device.torch, dtype, tokens, head) for tokens in lengths for head in (64, 128)]
        for operations in (*made, others(device.torch, dtype, max(lengths), width, vocab)):
            for operation in operations:
                torch._dynamo.reset()  # each shape is compiled anew, and is not counted as one too many
                rows.append(measured(operation, device, compiled))
    return {"rows": rows}
