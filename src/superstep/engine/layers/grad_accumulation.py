"""Layers that add weight gradients directly to the gradient buffer.

Autograd would make a new tensor for a weight's gradient and then add it to the buffer: one more pass over memory as
large as the weight for every microbatch, and for an embedding a whole table that is nearly all zeros. These layers add
in the product, or in the rows that were looked up; and they can defer the addition, when the backward pass has two
parts. Sums are fp32; ``numerics.accumulate_product`` says which products are rounded to bf16 before, and for experts
``model.mixture.experts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from superstep.engine.layers.implementation import Forward, Implementation
from superstep.kernels.product import linear, product
from superstep.model.custom.is_plain import is_plain_embedding, is_plain_linear
from superstep.model.mixture.experts import GroupedLinear, add_outer_products, grouped_linear
from superstep.numerics.accumulate_product import add_product
from superstep.numerics.fixed_point import Grid

Sum = Callable[[], object]
"""Adds to a gradient buffer."""

Adder = Callable[[Tensor], object]
"""Adds its argument to a gradient buffer."""

RowAdder = Callable[[Tensor, Tensor], object]
"""Adds rows to a gradient buffer: their numbers, [U], and their gradients, [U, D]."""


class GradientSums:
    """Additions of a rank's layers: done at once, or deferred within ``put_off``."""

    def __init__(self) -> None:
        self._waiting: list[Sum] | None = None

    def do(self, add: Sum) -> None:
        """Run ``add`` now, or defer it."""
        if self._waiting is None:
            add()
        else:
            self._waiting.append(add)

    @contextmanager
    def put_off(self) -> Iterator[list[Sum]]:
        """Collect the additions within the block, in order, for the caller to run."""
        noted: list[Sum] = []
        self._waiting = noted
        try:
            yield noted
        finally:
            self._waiting = None


@dataclass(frozen=True, slots=True)
class GradientSink:
    """The target of a parameter's gradient in exact mode: a part of a gradient buffer, the grid, and the additions."""

    into: Tensor
    grid: Grid
    sums: GradientSums

    def add(self, grad: Tensor) -> None:
        """Add a gradient now; may overwrite it. Raises OutOfRange as ``Grid.add``."""
        self.grid.add(self.into, grad)


def input_gradients(
    inputs: Sequence[Tensor],
    end: GradientEdge,
    gradient: Tensor,
    parameters: Sequence[tuple[nn.Parameter, Adder]],
    sums: GradientSums,
) -> tuple[list[Tensor], list[Sum]]:
    """A backward pass that adds to no gradient buffer: the gradients of the inputs that have one, and the deferred
    additions.

    Linears and embeddings defer their product or their rows. Autograd's gradients of other parameters, such as the
    weights of norms, are computed now and added later; for a layer with products of its own that is its whole gradient.
    Deferred tensors are detached: a graph would hold the inputs.

    Args:
        inputs: the start of the graph; tokens have no gradient.
        end: the end of the graph, with ``gradient``.
        parameters: all that the graph may reach, with the function that adds to the buffer of each.
        sums: of the layers.
    """
    leaves = [x for x in inputs if x.requires_grad]
    ends = [parameter for parameter, _ in parameters]
    with sums.put_off() as later:
        gradients = torch.autograd.grad([end], [*leaves, *ends], [gradient], allow_unused=True)
    of_parameters = gradients[len(leaves) :]
    later += [partial(add, grad) for (_, add), grad in zip(parameters, of_parameters, strict=True) if grad is not None]
    return list(gradients[: len(leaves)]), later


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, into: Tensor, sums: GradientSums) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.into, ctx.sums = into, sums
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        ctx.sums.do(partial(add_product, ctx.into, rows.t(), x.detach().flatten(0, -2)))
        return product(rows, weight).view_as(x), None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, add: RowAdder, sums: GradientSums) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens)
        ctx.add, ctx.sums = add, sums
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        ctx.sums.do(partial(ctx.add, tokens.flatten(), grad.flatten(0, -2)))
        return None, None, None, None


def embed_by_rows(layer: nn.Embedding, find_adder: Callable[[], RowAdder], sums: GradientSums) -> Forward:
    """The forward of an embedding whose gradient is handed over as rows, without a tensor of the table's shape.

    Args:
        layer: the embedding.
        find_adder: called at each forward pass.
        sums: of the layers.
    """

    def forward(tokens: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.embedding(tokens, layer.weight)
        # Tokens carry no gradient, so the graph needs the weight; its own gradient is not changed.
        out: Tensor = _Embedding.apply(tokens, layer.weight, find_adder(), sums)  # type: ignore[no-untyped-call]
        return out

    return forward


def _add_rows(into: Tensor, tokens: Tensor, grad: Tensor) -> None:
    rows = grad.to(into.dtype)
    # index_put sorts on a GPU, so that its sum has one order; index_add would use atomics there.
    if rows.is_cuda:
        into.index_put_((tokens,), rows, accumulate=True)
    else:
        into.index_add_(0, tokens, rows)


def accumulating_after() -> tuple[Implementation, ...]:
    """For layers with autograd's gradients, such as a compiled module: each is added to the buffer when it is complete.

    By default, autograd would first convert a bf16 gradient to fp32, and then add that.
    """

    def build(path: str, layer: nn.Module, inner: Forward) -> Forward:
        for param in layer.parameters(recurse=False):
            if param.dtype != torch.float32 and param.grad is not None:
                param.register_post_accumulate_grad_hook(hands_to(param.grad.add_))
                param.grad = None
                param.grad_dtype = param.dtype
        return inner

    return (Implementation("autograd's gradient, added when whole", "numerics.compile", has_own_parameters, build),)


def has_own_parameters(path: str, layer: nn.Module) -> bool:
    """Whether a layer has parameters itself, not only in layers inside it."""
    return any(parameter is not None for parameter in layer._parameters.values())


def hands_to(add: Adder) -> Callable[[Tensor], None]:
    """A hook that passes a parameter's complete gradient to ``add``, and keeps none."""

    def hand_over(param: Tensor) -> None:
        if param.grad is None:  # the layer has added it itself
            return
        add(param.grad)
        param.grad = None

    return hand_over


def hand_over_once(param: nn.Parameter, add: Adder) -> None:
    """Let a parameter's gradient be handed to ``add``; one that units share has one hook."""
    if not param._post_accumulate_grad_hooks:
        param.register_post_accumulate_grad_hook(hands_to(add))


def accumulating_straight(sums: GradientSums) -> tuple[Implementation, ...]:
    """The module's plain linears and embeddings. Layers with a forward, hooks or options of their own keep autograd's
    gradient. The weights' ``.grad`` must exist; frozen layers are not changed.
    """

    def is_trained(is_kind: Callable[[nn.Module], bool]) -> Callable[[str, nn.Module], bool]:
        def applies(path: str, layer: nn.Module) -> bool:
            return is_kind(layer) and layer.get_parameter("weight").requires_grad

        return applies

    def row(is_kind: Callable[[nn.Module], bool], make: Callable[[Any, GradientSums], Forward]) -> Implementation:
        return Implementation(
            "gradient straight into the buffer",
            "fast mode",
            is_trained(is_kind),
            lambda path, layer, inner: make(layer, sums),
        )

    return (
        row(is_plain_linear, _linear),
        row(is_plain_embedding, _embedding),
        row(lambda layer: type(layer) is GroupedLinear, _group_forward),
    )


def _linear(layer: nn.Linear, sums: GradientSums) -> Any:  # noqa: ANN401
    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, layer.weight, layer.bias)
        out: Tensor = _Linear.apply(x, layer.weight, layer.weight.grad, sums)  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias

    return forward


def _group_forward(layer: GroupedLinear, sums: GradientSums) -> Any:  # noqa: ANN401
    def forward(x: Tensor, rows_E: Tensor, part_R: Tensor | None = None) -> Tensor:
        into = layer.weight.grad
        assert into is not None

        def add(grad: Tensor, x: Tensor, rows_E: Tensor) -> None:
            sums.do(partial(add_outer_products, layer.by_output(into), grad, x.detach(), rows_E))

        return grouped_linear(x, layer.by_output(layer.weight), rows_E, add)

    return forward


def _embedding(layer: nn.Embedding, sums: GradientSums) -> Forward:
    def find_adder() -> RowAdder:
        into = layer.weight.grad
        assert into is not None
        return partial(_add_rows, into)

    return embed_by_rows(layer, find_adder, sums)
