"""Checks numerically whether this machine keeps what exact mode needs.

An element of a product must depend only on its own row and column, and an element of a function or of a row's sum only
on that element or row, whatever else is computed beside it. ``numerics.invariant_matmul`` says what was measured where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from superstep.kernels import exact_attention, triton_loader
from superstep.kernels.invariant import row_norm, row_sum
from superstep.numerics.invariant_matmul import PIECE, product

INNER = (8, 44, 64, 176, PIECE, 2 * PIECE + 40)
OUTER = (2, 5, 16, 33, 64)
WHOLE = 192
WIDTH = 32
"""Of a head."""
LENGTHS = (1, 7, 16, 31, 63, 100)


def first_difference(dtype: torch.dtype, device: torch.device) -> str | None:
    """The first need of exact mode that this machine does not keep; None where it keeps all."""
    return next(_differences(dtype, device), None)


def _differences(dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    if device.type == "cuda" and (why := triton_loader.missing(device)):
        yield f"its products and sums on a GPU are in Triton, and {why}"
        return
    random = torch.Generator("cpu").manual_seed(0)
    for inner in INNER:
        left = torch.randn(WHOLE, inner, generator=random).to(device, dtype)
        right = torch.randn(inner, WHOLE, generator=random).to(device, dtype)
        for form, (a, b) in _forms(left, right).items():
            whole = product(a, b)
            for size in OUTER:
                if not torch.equal(product(_like(a[:size], a), b), whole[:size]):
                    yield f"a {form} product over {inner} of {size} rows has other bits than of more"
                if not torch.equal(product(a, _like(b[:, -size:], b)), whole[:, -size:]):
                    yield f"a {form} product over {inner} of {size} columns has other bits than of more"
    if exact_attention.is_for(WIDTH, device):
        yield from _attention_differences(random)
    for name, function in _functions().items():
        values = torch.randn(WHOLE, PIECE, generator=random).to(device)
        whole = function(values)
        for count in LENGTHS:
            if not torch.equal(function(values[:count].clone()), whole[:count]):
                yield f"{name} of {count} rows has other bits than of more"


def _attention_differences(random: torch.Generator) -> Iterator[str]:
    q, k, v = (torch.randn(1, 2, WHOLE, WIDTH, generator=random) for _ in "qkv")
    whole, _ = exact_attention.attend(q, k, v)
    for count in LENGTHS:
        some, _ = exact_attention.attend(q[:, :, -count:], k, v, first=WHOLE - count)
        if not torch.equal(some, whole[:, :, -count:]):
            yield f"attention of {count} queries has other bits than of more"


def _forms(left: Tensor, right: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors' layouts in a layer's forward pass, and in the two products of its backward pass."""
    return {
        "forward": (left, right.t().contiguous().t()),
        "backward": (left, right),
        "gradient's": (left.t().contiguous().t(), right),
    }


def _like(part: Tensor, whole: Tensor) -> Tensor:
    """A copy of the part, laid out like the whole."""
    return part.contiguous() if whole.is_contiguous() else part.t().contiguous().t()


def _functions() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "an exponential": torch.exp,
        "a logarithm": lambda x: x.abs().add(1.0).log(),
        "a root": lambda x: x.abs().sqrt(),
        "a softmax": lambda x: torch.softmax(x, -1),
        "a sum": row_sum,
        "a norm": row_norm,
        "a cosine": torch.cos,
    }
