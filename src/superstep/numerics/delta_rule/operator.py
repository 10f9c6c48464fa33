"""The gated delta rule of whole sequences, within each of their documents, as operators of torch's dispatcher.

Selective recompute keeps the operator's result, and a compiler sees one call for any number of documents.

    B  sequences    S  positions    K  key heads, of H numbers    N  value heads, of V numbers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from superstep.numerics.delta_rule.chunks import (
    Chunks,
    find_pieces,
    group_pieces,
    list_chunks,
    make_room,
    take_rows,
)
from superstep.numerics.delta_rule.rule import (
    Inputs,
    Terms,
    backward,
    find_terms,
    pass_gradients,
    pass_states,
    read_gradients,
    read_states,
    widen,
)
from superstep.numerics.delta_rule.sums import Sums
from superstep.plan.model.attention_rule import DELTA_CHUNK


@torch.library.custom_op("superstep::delta_rule", mutates_args=())
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool
) -> Tensor:
    """The outputs, [B, S, N, V].

    Args:
        q, k: [B, S, K, H].
        v: [B, S, N, V].
        g: the logarithm of the share of the state that stays, [B, S, N].
        beta: the share of the correction that is made, [B, S, N].
        starts: int64 [B, S] on the host, the start of each token's document; None for one document in each row.
        is_exact: whether bits must not depend on the layout.
    """
    sums, room = Sums(is_exact), make_room(v)
    for chunks in _list_groups(q, starts):
        terms = find_terms((q, k, v, g, beta), chunks, sums)
        out = read_states(terms, pass_states(terms, chunks.steps, empty_states(terms, chunks), sums), sums)
        chunks.put(out[..., : v.shape[-1]], room)
    return take_rows(room, v)


@torch.library.custom_op("superstep::delta_rule_backward", mutates_args=())
def _delta_rule_backward(  # noqa: PLR0913
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g and beta."""
    sums, inputs = Sums(is_exact), (q, k, v, g, beta)
    rooms = [make_room(x) for x in inputs]
    for chunks in _list_groups(q, starts):
        terms = find_terms(inputs, chunks, sums)
        none = empty_states(terms, chunks)
        passed = pass_states(terms, chunks.steps, none, sums)
        of_out = split_gradient(grad, chunks, sums)
        of_corrected, of_states, _ = pass_gradients(
            terms, chunks.steps, read_gradients(terms, of_out, sums), none, sums
        )
        put_gradients(backward(terms, passed, of_out, of_corrected, of_states, sums), chunks, rooms)
    return take_gradients(rooms, inputs)


def empty_states(terms: Terms, chunks: Chunks) -> Tensor:
    """A state of zeros for each piece, [pieces, N, H, V]."""
    return terms.u.new_zeros(len(chunks.pieces), terms.u.shape[1], terms.w.shape[-1], terms.u.shape[-1])


def split_gradient(grad: Tensor, chunks: Chunks, sums: Sums) -> Tensor:
    """The gradient of the outputs by chunk, [M, N, C, V]."""
    return sums.pad(widen(chunks.split(grad))).transpose(1, 2).contiguous()


def put_gradients(by_chunk: Sequence[Tensor], chunks: Chunks, rooms: Sequence[Tensor]) -> None:
    """Write the gradients of the inputs of some chunks into their rooms."""
    for x, room in zip(by_chunk, rooms, strict=True):
        chunks.put(x[..., : room.shape[-1]], room)


def take_gradients(rooms: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the inputs, in their shapes."""
    dq, dk, dv, dg, dbeta = (take_rows(room, like) for room, like in zip(rooms, inputs, strict=True))
    return dq, dk, dv, dg, dbeta


def _list_groups(q: Tensor, starts: Tensor | None) -> Iterator[Chunks]:
    """The chunks of all documents, in groups of as many tokens as there are."""
    rows, tokens = q.shape[:2]
    pieces = find_pieces(None if starts is None else starts.cpu(), rows, tokens)
    for group in group_pieces(pieces, -(-tokens // DELTA_CHUNK) * rows):
        yield list_chunks(group, tokens, rows * tokens, q.device)


@delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_delta_rule_backward.register_fake
def _(  # noqa: PLR0913
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    *tensors, ctx.is_exact = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None, None]:  # noqa: ANN401
    return *_delta_rule_backward(grad.contiguous(), *ctx.saved_tensors, ctx.is_exact), None, None


delta_rule.register_autograd(_backward, setup_context=_keep)
